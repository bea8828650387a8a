"""What is said of a race, a layout and changed assumptions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from entrain_bench.answers.recommend.recommendation import assumption_effect, spent_s
from entrain_bench.answers.recommend.strategy_race import standings
from entrain_bench.answers.recommend.words import (
    Omitted,
    layout_values,
    losses,
    no_result_lines,
    ranking_lines,
    so_far,
    spans,
    spent_lines,
)
from entrain_bench.answers.text import TIME_WORDS, load_template, one_line
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.records.records import Record
from support.builders import as_ints

TIMES = {"slow": {0: 1.5, 1: 1.6, 2: 1.7}, "fast": {0: 1.0, 1: 1.0, 2: 1.25}, "lost": {0: None}, "far": {0: 2.0}}


def words(macro: str, *values: object) -> list[str]:
    """The lines of a macro of the template."""
    text = str(getattr(load_template("recommendation.jinja").module, macro)(*values))
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def test_a_table_keeps_who_is_how_fast_in_a_narrow_terminal() -> None:
    ranked = standings(TIMES)
    wide = ranking_lines(ranked, 80)
    assert wide[0].split() == ["strategy", "s/iter", "behind", "95%", "seeds"]
    assert wide[2].split() == ["fast", "1.083", "-", "-", "3"]
    assert wide[3].split()[:3] == ["slow", "1.600", "+48.3%"]
    assert wide[4].split()[:3] == ["far", "2.000", "+100.0%"]
    assert wide[4].endswith("behind")
    narrow = ranking_lines(ranked, 10)
    assert narrow[0].split() == ["strategy", "s/iter", "behind"]


def spent(work: float, microbatches: float, step: float) -> dict[str, float]:
    own = {"time_work_share": work, "time_microbatches_share": microbatches, "time_step_share": step}
    return dict.fromkeys(TIME_WORDS, 0.0) | own


def test_where_time_goes() -> None:
    found = {"fast": spent(0.6, 0.3, 0.1), "slow": spent(0.6, 0.82, 0.08), "less": spent(0.6, 0.0, 0.2)}
    wide = spent_lines(found, 80)
    assert [line.rsplit(maxsplit=3) for line in wide[2:]] == [
        ["ideal work", "0.600", "0.600", "0.600"],
        ["unequal microbatches, order", "0.300", "0.820", "0.000"],
        ["step: gradients, optimizer, weights", "0.100", "0.080", "0.200"],
        ["iteration", "1.000", "1.500", "0.800"],
    ]
    assert spent_lines(found, 45)[0].split() == ["fast"]
    shown = [one_line(" ".join(words("loss", each, not place))) for place, each in enumerate(losses(found))]
    assert shown == [
        "60% of fast's GPU time is ideal work; the largest part of the rest is unequal microbatches and order (30%).",
        # The step's -0.020 is less than a tenth of the difference.
        "slow takes 0.500 s more: unequal microbatches and order +0.520.",
        "less takes 0.200 s less: unequal microbatches and order -0.300, step +0.100.",
    ]
    spent_s = dict.fromkeys(TIME_WORDS, 0.1)
    _, equal = losses({"one": spent_s, "two": {**spent_s}})
    assert words("loss", equal, False) == ["two takes the same time."]


def test_seconds_are_those_of_iterations() -> None:
    # One of 1 s, half of it work, and one of 3 s, all of it: 1.75 s of 2 s. Of the means it would be 0.75 x 2 s.
    rows = [dict.fromkeys(TIME_WORDS, 0.0) | {"iteration_time_s": 1.0, "time_work_share": 0.5, "time_step_share": 0.5}]
    rows.append(rows[0] | {"iteration_time_s": 3.0, "time_work_share": 1.0, "time_step_share": 0.0})
    record = Record("", "ok", "", {}, {}, "", iterations=tuple(rows))
    found = spent_s([record])
    assert (found["time_work_share"], found["time_step_share"]) == (1.75, 0.25)
    assert sum(found.values()) == 2.0


def test_the_race_so_far_in_one_line() -> None:
    assert so_far(TIMES, 20) == (
        "fast 1.083 s, then slow +48.3%, far +100.0% (4 of 20 strategies, 1 without a result; seeds 0 to 2)"
    )
    assert so_far({"lost": {0: None}}, 3) == "no result yet (1 of 3 strategies, seed 0)"


def layout_lines_of(layout: Layout) -> list[str]:
    return words("layout_lines", layout_values(layout))


def test_a_layout_in_words() -> None:
    ranks = np.arange(16).reshape(2, 4, 2)
    vision = ModuleLayout("vision", 1, 2, (3, 2), ranks[:, :2], recompute=True)
    llm = ModuleLayout("llm", 2, 1, (1, 1, 1, 2), np.concatenate([ranks[:, 2:]] * 2, axis=1), sharded=False)
    assert layout_lines_of(Layout((vision, llm), 4)) == [
        "vision  TP 1, CP 2, PP 2, DP 2; layers 3/2; "
        "ranks 0-3, each next replica 8 ranks later; activations recomputed",
        "llm     TP 2, CP 1, PP 2, DP 2; 2 virtual stages a rank, layers 1/1/1/2; "
        "ranks 4-7, each next replica 8 ranks later",
        "No module shares a rank with another.",
    ]
    whole = ModuleLayout("vision", 2, 1, (5,), ranks[:, :1])
    chain = ModuleLayout("llm", 2, 1, (1, 1, 1, 2), ranks)
    assert layout_lines_of(Layout((whole, chain), 4))[-1] == "vision and llm share 4 ranks."
    assert layout_lines_of(Layout((replace(chain, module="vision"), chain), 4))[-1] == "All modules share all ranks."
    assert len(layout_lines_of(Layout((chain,), 4))) == 1
    # Two stages of four ranks, whose groups have one, two or four.
    plane = np.arange(8).reshape(2, 4, 1).swapaxes(0, 1)
    grouped = ModuleLayout("llm", 1, 1, (2, 3), plane, sharded=True, widths=((1, 1), (1, 2), (2, 2)))
    assert layout_lines_of(Layout((grouped,), 4)) == [
        "llm  PP 2, groups of TP x CP 1x1, 1x2, 2x2; layers 2/3; ranks 0-7; "
        "weights sharded over all ranks, gathered layer by layer"
    ]


def test_spans_of_ranks() -> None:
    assert spans(as_ints([3, 0, 1, 2, 8])) == "0-3, 8"
    assert spans(as_ints(range(0, 40, 2))) == "0, 2, 4, 6, 8, ..., 38"


def test_what_changed_assumptions_do() -> None:
    found = assumption_effect(
        "x", "a", {0: 1.0, 1: 2.0}, {"a": {0: 1.1, 1: 2.2}, "b": {0: 1.0, 1: 2.0}, "c": {0: None, 1: 3.0}}
    )
    assert found.change
    assert round(found.change.mean, 9) == 1.1
    assert found.overtaking == ["b"]
    assert found.rivals["c"] is None
    # Who has no result is overtaken by whoever has one.
    lost = assumption_effect("x", "a", {0: 1.0}, {"a": {0: None}, "b": {0: 1.5}, "c": {0: None}})
    assert (lost.change, lost.overtaking) == (None, ["b"])


def test_what_was_not_considered() -> None:
    always = "one strategy with another's planner, assigner or schedule; other settings of the framework and the job."
    omitted = [
        Omitted({}, {"ours"}, []),
        Omitted({"dip": "published", "fsdp": "out_of_the_box"}, {"ours", "out_of_the_box"}, ["layout.dp=4"]),
    ]
    assert [" ".join(words("omitted", each.to_dict())) for each in omitted] == [
        f"Not considered: {always}",
        f"Not considered: dip and fsdp (whole families: Published systems); other values than layout.dp=4; {always}",
    ]


def test_no_result_is_said_with_the_most_frequent_reason_first() -> None:
    assert no_result_lines({"a": "small", "b": "small"}) == ["no strategy has a result: small"]
    assert no_result_lines({"a": "one", "b": "two", "c": "two"}) == [
        "no strategy has a result, of 2 of 3: two",
        "b and c: two",
        "a: one",
    ]
