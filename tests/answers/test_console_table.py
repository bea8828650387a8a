"""What is printed of runs: rows that can be told apart, columns as the width allows, and words that are true."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from entrain_bench.answers.answer import Answer
from entrain_bench.answers.cases import cases_of, groups_of, swept_paths
from entrain_bench.answers.console_table import summary
from entrain_bench.answers.tables import compared
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


def lines(records: Sequence[Record], width: int = WIDE) -> list[str]:
    return [line.plain for line in summary(records, width)]


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
        assert {*heading[start:].split()} <= {"s/iter", "runs"}


TIMES = st.lists(st.floats(0.5, 2.0), min_size=3, max_size=3)


@pytest.mark.wide
@given(st.dictionaries(st.sampled_from(["megatron", "entrain", "dip", "dflop"]), TIMES, min_size=2))
@settings(max_examples=100, deadline=None)
def test_bold_are_those_that_the_documents_print_in_bold(times: dict[str, list[float]]) -> None:
    records = [record for name, each in times.items() for record in seeds(name, each)]
    data = pd.DataFrame([{**record.labels, "status": "ok", **record.metrics} for record in records])
    expected = compared(data, ["model", "workload"])[MODELS[0], "coco"].best
    bold = [line.plain.split()[0] for line in summary(records, WIDE) if line.style == "bold"]
    assert {*bold} == {*expected}
    (case,) = cases_of(records)
    # No order hangs on a last digit.
    shown = [row.standing.time.mean for row in case.results if row.standing.time]
    assert shown == pytest.approx(sorted(sum(each) / 3 for each in times.values()), rel=1e-9)


def test_degrees_asked_of_several_strategies_make_a_case_of_their_own() -> None:
    times = {("megatron", 2): 3.0, ("entrain", 2): 2.0, ("megatron", 4): 1.0, ("entrain", 4): 2.0}
    records = [made(name, time=time, config={"layout": {"tp": tp}}) for (name, tp), time in times.items()]
    found = [(each["fastest"], each["cases"]) for each in Answer.of(records).to_dict()["winners"]]
    assert found == [(["entrain"], ["tp=2"]), (["megatron"], ["tp=4"])]


def test_without_megatron_the_first_in_figures_is_the_baseline() -> None:
    ordered = [
        made(name, time=1.0 + place, config={"strategy": {"display_order": place}})
        for place, name in enumerate(("dip", "dflop"))
    ]
    assert "speedup: over dip, seed by seed" in lines(ordered)[1]
    assert lines(ordered[:1])[1].split()[0] == "strategy", "a single strategy has nothing to be compared with"


def test_what_all_have_in_common_stands_above_the_table() -> None:
    records = [*seeds("megatron", [2.0, 2.2]), *seeds("entrain", [1.0, 1.1])]
    first, legend, heading, *_ = lines(records)
    assert first == "workload coco, model qwen25vl_llama3_1b, cluster a40x64, harness simulate, seeds 0, 1"
    assert "speedup: over megatron, seed by seed" in legend
    assert heading.split() == ["strategy", "s/iter", "±", "speedup", "95%", "MFU", "%", "peak", "GiB"]


def test_speedups_are_over_the_baseline_of_the_same_job_at_the_same_seeds() -> None:
    records = [
        *seeds("megatron", [2.0, 4.0]),
        *seeds("entrain", [1.0, 1.0]),
        *seeds("megatron", [3.0, 3.0], workload="sroie"),
        made("entrain", 0, 1.5, workload="sroie"),
        made("entrain", 1, status="failed", workload="sroie"),
        *seeds("entrain", [1.0, 1.0], workload="chartqa"),
    ]
    found = {
        (case.job["workload"], row.group.strategy): row.standing.speedup
        for case in cases_of(records)
        for row in case.results
    }
    # Geometric: 2 x and 4 x.
    both = found["coco", "entrain"]
    assert both is not None
    assert both.mean == pytest.approx(8**0.5)
    assert both.num_values == 2
    one = found["sroie", "entrain"]
    assert one is not None
    assert (one.mean, one.num_values) == (pytest.approx(2.0), 1)
    assert found["chartqa", "entrain"] is None
    _, rows = table(records)
    assert [row.split()[:2] for row in rows] == [
        ["entrain", "chartqa"],
        ["entrain", "coco"],
        ["megatron", "coco"],
        ["megatron", "sroie"],
        ["entrain", "sroie"],
    ]
    assert "1/2" in rows[4], "whoever failed cannot win"


def test_metrics_come_by_priority_as_the_width_allows() -> None:
    names = ("megatron", "hetero_noncolocated")
    records = [
        record
        for name in names
        for model in MODELS
        for workload in ("chartqa", "opencqa_ocr")
        for record in seeds(name, [1.0, 2.0], model=model, workload=workload)
    ]
    shown = {}
    for width in (60, 70, 80, 100, 140, 200):
        (heading,), rows = table(records, width)
        shown[width] = re.split(r"  +", heading)
        assert max(len(row) for row in rows) <= width
    assert shown[60] == ["strategy", "workload", "model", "s/iter"]
    assert shown[70] == [*shown[60], "speedup"]
    assert shown[80] == [*shown[60], "±", "speedup"]
    assert shown[200] == [*shown[80], "95%", "MFU %", "peak GiB"]
    assert {*shown[80]} < {*shown[100]} < {*shown[200]} == {*shown[140]}


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


def test_another_device_is_one_column() -> None:
    devices = [
        {"cluster": {"device": {"flops": flops, "name": name}, "sources": {"device.flops": f"{name} datasheet"}}}
        for name, flops in (("A40", 1.0), ("A100", 2.0))
    ]
    assert swept_paths([made(config=device) for device in devices]) == ["cluster.device.name"]


def test_degrees_of_one_job_are_compared_and_jobs_are_not() -> None:
    times = {(2, 0.7): 3.0, (4, 0.7): 2.0, (2, 1.3): 1.0, (4, 1.3): 1.5}
    records = [
        made(time=time, config={"layout": {"tp": tp}, "speed": {"gemm": gemm}}) for (tp, gemm), time in times.items()
    ]
    _, rows = table(records)
    assert [row.split()[:2] for row in rows] == [["4", "0.7"], ["2", "0.7"], ["2", "1.3"], ["4", "1.3"]]
    found = [(*each["fastest"], *each["cases"]) for each in Answer.of(records).to_dict()["winners"]]
    assert found == [("entrain tp=4", "gemm=0.7"), ("entrain tp=2", "gemm=1.3")]


def test_problems_come_before_the_answer_and_losses_last() -> None:
    records = [
        *seeds("megatron", [2.0, 2.01, 2.02]),
        *seeds("entrain", [1.0, 1.01, 1.02]),
        *seeds("dip", [1.0, 1.0, 1.0], status="failed"),
        *seeds("dip", [3.0, 3.0], workload="sroie"),
        made("dip", 2, status="skipped", workload="sroie"),
    ]
    shown = [line for line in lines(records) if line.split()[0:1] in (["failed:"], ["skipped:"], ["entrain"], ["Of"])]
    assert [line.split()[0] for line in shown] == ["entrain", "failed:", "skipped:", "entrain", "Of"]


def test_one_run_and_none_that_succeeded() -> None:
    first, heading, _, row = lines([made(seed=7, time=0.00123)])
    assert first.endswith("harness simulate, seed 7")
    assert heading.split()[:2] == ["strategy", "s/iter"]
    assert row.split()[:2] == ["entrain", "0.00123"]
    assert lines([made(seed=7, status="failed")])[1:] == [
        "",
        "failed: entrain, 1 of 1 runs (seed 7): too large at seed 7",
        "Of 1 run 1 failed (seed 7).",
    ]
    assert lines([]) == []


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
    skipped = {"status": "skipped", "seeds": [0, 1] * 5, "num_runs": 10, "reason": "audio", "name": "librispeech"}
    assert values["problems"] == [skipped]
    assert values["without_result"] == {"skipped": [0, 1] * 5}
    assert [each["outcome"] for each in values["winners"]] == ["DECIDED", "NO_RESULT"]
    # Not all at librispeech: each by its name.
    apart = Answer.of([*records, *audio[2:], *seeds("megatron", [1.0, 1.0], workload="librispeech")]).to_dict()
    assert len(apart["problems"]) == len(names) - 1
    assert "dip librispeech" in [each["name"] for each in apart["problems"]]
