"""What is said of a race, a layout and changed assumptions."""

from __future__ import annotations

import numpy as np

from entrain_bench.answers.recommend.recommendation import assumption_effect, spent_s
from entrain_bench.answers.recommend.strategy_race import standings
from entrain_bench.answers.recommend.words import (
    module_values,
    no_result_lines,
    ranking_lines,
    reason,
    spent_lines,
)
from entrain_bench.answers.text import TIME_WORDS, load_template
from entrain_bench.program.layout import ModuleLayout
from entrain_bench.records.records import Record

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
    assert " ".join(words("reason", reason(found))) == (
        "60% of fast's GPU time is ideal work; the largest part of the rest is unequal microbatches and order (30%)."
    )


def test_seconds_are_those_of_iterations() -> None:
    # One of 1 s, half of it work, and one of 3 s, all of it: 1.75 s of 2 s. Of the means it would be 0.75 x 2 s.
    rows = [dict.fromkeys(TIME_WORDS, 0.0) | {"iteration_time_s": 1.0, "time_work_share": 0.5, "time_step_share": 0.5}]
    rows.append(rows[0] | {"iteration_time_s": 3.0, "time_work_share": 1.0, "time_step_share": 0.0})
    record = Record("", "ok", "", {}, {}, "", iterations=tuple(rows))
    found = spent_s([record])
    assert (found["time_work_share"], found["time_step_share"]) == (1.75, 0.25)
    assert sum(found.values()) == 2.0


def test_a_layout_in_words() -> None:
    ranks = np.arange(16).reshape(2, 4, 2)
    vision = ModuleLayout("vision", 1, 2, (3, 2), ranks[:, :2], recompute=True)
    llm = ModuleLayout("llm", 2, 1, (1, 1, 1, 2), np.concatenate([ranks[:, 2:]] * 2, axis=1), sharded=False)
    # Two stages of four ranks, whose groups have one, two or four.
    plane = np.arange(8).reshape(2, 4, 1).swapaxes(0, 1)
    grouped = ModuleLayout("llm", 1, 1, (2, 3), plane, sharded=True, widths=((1, 1), (1, 2), (2, 2)))
    shown = [line for module in (vision, llm, grouped) for line in words("module", module_values(module), 6)]
    assert shown == [
        "vision  TP 1, CP 2, PP 2, DP 2; layers 3/2; ranks 0-3, 8-11; activations recomputed",
        "llm     TP 2, CP 1, PP 2, DP 2; 2 virtual stages a rank, layers 1/1/1/2; ranks 4-7, 12-15",
        "llm     PP 2, groups of TP x CP 1x1, 1x2, 2x2; layers 2/3; ranks 0-7; "
        "weights sharded over all ranks, gathered layer by layer",
    ]


def test_what_changed_assumptions_do() -> None:
    found = assumption_effect(
        "x", "a", {0: 1.0, 1: 2.0}, {"a": {0: 1.1, 1: 2.2}, "b": {0: 1.0, 1: 2.0}, "c": {0: None, 1: 3.0}}
    )
    assert round(found["change"].mean, 9) == 1.1
    assert (found["overtaking"], [*found["speedups"]]) == (["b"], ["b"])
    # Who has no result is overtaken by whoever has one.
    lost = assumption_effect("x", "a", {0: 1.0}, {"a": {0: None}, "b": {0: 1.5}, "c": {0: None}})
    assert (lost["change"], lost["overtaking"]) == (None, ["b"])


def test_no_result_is_said_with_the_most_frequent_reason_first() -> None:
    assert no_result_lines({"a": "small", "b": "small"}) == ["no strategy has a result: small"]
    assert no_result_lines({"a": "one", "b": "two", "c": "two"}) == [
        "no strategy has a result, of 2 of 3: two",
        "b and c: two",
        "a: one",
    ]
