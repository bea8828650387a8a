"""What is printed of runs: rows that can be told apart, columns as the width allows, and words that are true."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from entrain_bench.answers.answer import Answer
from entrain_bench.answers.cases import groups_of, swept_paths
from entrain_bench.answers.console_table import print_texts, summary
from entrain_bench.records.leaves import flatten
from entrain_bench.records.records import Record

MODELS = ("qwen25vl_llama3_1b", "qwen25vl_llama3_3b")
WIDE = 200


def made(
    strategy: str = "entrain",
    seed: int = 0,
    time: float = 1.0,
    status: str = "ok",
    config: Mapping[str, Any] | None = None,
    **names: str,
) -> Record:
    """A record with the default names, those metrics that the table shows first, and some configuration."""
    labels = {"workload": "coco", "model": MODELS[0], "cluster": "a40x64", "harness": "simulate"} | names
    metrics = {"iteration_time_s": time, "mfu": 0.25, "peak_memory_bytes": 2.0**34} if status == "ok" else {}
    reason = "" if status == "ok" else f"too large at seed {seed}"
    own = {"display_order": 0} if strategy == "megatron" else {}
    content = {"seed": seed, **(config or {})}
    content["strategy"] = own | content.get("strategy", {})
    return Record(
        "0" * 16, status, reason, {"strategy": strategy, **labels, "seed": seed}, content, "", metrics=metrics
    )


def seeds(strategy: str, times: Sequence[float], **others: Any) -> list[Record]:
    return [made(strategy, seed, time, **others) for seed, time in enumerate(times)]


def lines(records: Sequence[Record], width: int = WIDE, asked: Sequence[str] = ()) -> list[str]:
    return [line.plain for line in summary(records, width, asked=asked)]


def table(records: Sequence[Record], width: int = WIDE) -> tuple[list[str], list[str]]:
    """The line of the headings, and those of the rows."""
    shown = lines(records, width)
    (rule,) = (place for place, line in enumerate(shown) if line.startswith("───"))
    rows = [line for line in shown[rule + 1 :] if line]
    return [shown[rule - 1]], rows[: len(groups_of(records))]


VALUES = st.sampled_from([None, True, 1, 1.0, 2, "1", "None", "null", "a b", "a  b", "", [1, 2], [], "2x"])
PARTS = st.fixed_dictionaries(
    {"_target_": st.sampled_from(["one.Planner", "other.Planner", "one.Searcher"])},
    optional={"num_trials": VALUES, "strategy": VALUES},
)
CONFIGS = st.fixed_dictionaries(
    {"layout": st.fixed_dictionaries({"tp": VALUES})},
    optional={"strategy": st.fixed_dictionaries({"planner": PARTS}), "runs": VALUES, "harness": PARTS},
)
WORDS = st.text(st.sampled_from("ab_ -9."), min_size=1, max_size=30)
RUNS = st.builds(
    made,
    st.sampled_from(["megatron", "entrain", "hetero_noncolocated"]) | WORDS,
    st.integers(0, 3),
    st.floats(0.1, 9.0),
    st.sampled_from(["ok", "ok", "failed"]),
    CONFIGS,
    workload=st.sampled_from(["chartqa", "opencqa_ocr"]) | WORDS,
    model=st.sampled_from(MODELS),
    cluster=st.sampled_from(["a40x64", "h100x256"]),
)


@pytest.mark.wide
@given(st.lists(RUNS, min_size=1, max_size=12), st.integers(60, 200))
@settings(max_examples=150, deadline=None)
def test_no_label_is_cut_and_no_two_rows_look_alike(records: list[Record], width: int) -> None:
    cases = groups_of(records)
    apart = {
        repr([record.labels[name] for name in record.labels if name != "seed"])
        + repr(sorted((path, repr(value)) for path, value in flatten(record.config).items() if path != "seed"))
        for record in records
    }
    assert len(cases) == len(apart) == len({tuple(case.labels.values()) for case in cases})
    if all(record.status != "ok" for record in records):
        return
    (heading,), rows = table(records, width)
    # Times and states here take as many places as their heading.
    start = heading.index("s/iter")
    assert len({row[:start] for row in rows}) == len(rows) == len(cases)
    varying = [name for name in cases[0].labels if len({case.labels[name] for case in cases}) > 1] or ["strategy"]
    for case in cases:
        whole = re.compile(r" +".join(re.escape(case.labels[name]) for name in varying) + r" *")
        assert any(whole.fullmatch(row[:start]) for row in rows), case.labels
    constant = " ".join(" ".join(lines(records, width)[: lines(records, width).index(heading)]).split())
    for name in cases[0].labels.keys() - {*varying}:
        assert " ".join(f"{name} {cases[0].labels[name]}".split()) in constant
    # Too wide is only what the labels make so.
    if max(map(len, rows)) > width:
        assert {*heading[start:].split()} <= {"s/iter", "runs", "speedup"}


def test_a_part_and_its_parameters_are_both_columns_if_both_were_swept() -> None:
    def with_planner(target: str, trials: int) -> Record:
        planner = {"_target_": f"parts.{target}", "num_trials": trials, "own": target}
        return made(config={"strategy": {"planner": planner}})

    both = [with_planner(target, trials) for target in ("One", "Other") for trials in (1, 8)]
    assert swept_paths(both) == ["strategy.planner._target_", "strategy.planner.num_trials"]
    (heading,), rows = table(both)
    assert heading.split()[:2] == ["planner", "planner.num_trials"]
    assert sorted(row.split()[:2] for row in rows) == [["One", "1"], ["One", "8"], ["Other", "1"], ["Other", "8"]]
    # Parameters that come with the part need no column.
    assert swept_paths([with_planner("One", 1), with_planner("Other", 8)]) == ["strategy.planner._target_"]


def test_one_run_and_none_that_succeeded() -> None:
    first, heading, _, row = lines([made(seed=7, time=0.00123)])
    assert first.endswith("harness simulate, seed 7")
    assert heading.split()[:2] == ["strategy", "s/iter"]
    assert row.split()[:2] == ["entrain", "0.00123"]
    assert lines([made(seed=7, status="failed")])[1:] == [
        "",
        "failed: entrain, 1 of 1 runs (seed 7): too large at seed 7",
    ]
    assert lines([]) == []


def test_columns_compare_layouts_and_others_are_asked_for() -> None:
    def bounded(name: str, seed: int, time: float, layout_bound: float) -> Record:
        bounds = {"lower_bound_s": layout_bound, "cluster_bound_s": 0.5, "gap_to_lower_bound": time / layout_bound - 1}
        more = {"samples_per_s": 64 / time, "encoder_forward_std_ms": 1.25, "bubble_ratio": 0.5}
        one = made(name, seed, time)
        return replace(one, metrics={**one.metrics, **bounds, **more})

    pairs = [("megatron", 1.0, 0.8), ("entrain", 0.75, 0.4)]
    records = [bounded(name, seed, time * (1 + seed), least) for name, time, least in pairs for seed in (0, 1)]
    _, legend, heading, _, first, second, *_ = lines(records)
    assert re.split(r"  +", heading) == [
        *("strategy", "s/iter", "±", "speedup", "MFU %", "gap %", "peak GiB", "samples/s"),
    ]
    assert re.split(r"  +", first)[-4:] == ["25.0", "125.0", "16.0", "64.0"]
    assert re.split(r"  +", first)[3] == "1.33x (1.33 to 1.33)"
    assert re.split(r"  +", second)[-5:] == ["-", "25.0", "200.0", "16.0", "48.0"]
    assert legend.endswith("gap: above the lower bound of the cluster")
    shown = lines(records, 60, ["encoder_forward_std_ms", "lower_bound_s"])
    assert shown[3].endswith("  encoder_forward_std_ms  lower_bound_s")
    # No layout's bound is below that of every layout.
    assert [line.split()[-2:] for line in shown[5:7]] == [["1.25", "0.5"], ["1.25", "0.8"]]


def test_wide_characters_and_markup_keep_columns_in_line() -> None:
    records = [made(name) for name in ("[bold]x[/]", "均衡", "megatron")]
    (heading,), rows = table(records, 80)
    assert {row.split()[0] for row in rows} == {"[bold]x[/]", "均衡", "megatron"}

    assert len({cell_len(row) for row in (heading, *rows)}) == 1


def test_what_failed_alike_is_named_once() -> None:
    names = ("megatron", "entrain", "dip", "dflop", "disttrain")
    records = [record for name in names for record in seeds(name, [1.0, 2.0])]
    audio = [
        replace(made(name, seed, status="skipped", workload="librispeech"), reason="audio")
        for name in names
        for seed in (0, 1)
    ]
    values = Answer.of([*records, *audio]).to_dict()
    skipped = {"status": "skipped", "seeds": [0, 1] * 5, "num_runs": 10, "reason": "audio"}
    (problem,) = values["problems"]
    assert problem == {**skipped, "names": problem["names"]}
    assert {*problem["names"]} == {f"{name} librispeech" for name in names}
    assert [each["outcome"] for each in values["winners"]] == ["DECIDED", "NO_RESULT"]


@pytest.mark.parametrize("width", [30, 60, 200])
def test_names_of_a_list_are_whole_at_any_width(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    names = ["qwen25vl_llama3_1b", "hf:mistralai/Mistral-Small-3.1-24B-Instruct-2503"]
    words = "An encoder of images, and a language model"
    print_texts(["model", "description"], [[name, words] for name in names], left=2)
    _, _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0].strip() for line in lines if line[0] != " "] == names
    assert " ".join(" ".join(line[max(map(len, names)) :] for line in lines).split()) == f"{words} {words}"
    # A column of words has at least 40 places.
    assert max(map(len, lines)) <= max(width, max(map(len, names)) + 2 + 40)
