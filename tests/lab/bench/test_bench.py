"""What the benchmark measures; no test asserts a time."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from entrain_bench.config.tree import choices
from entrain_bench.lab.bench import everyday
from entrain_bench.lab.bench.__main__ import main
from entrain_bench.lab.bench.cases import ASSIGNMENT_TARGETS, CASES, GLOBAL_BATCHES, LPT, TINY
from entrain_bench.lab.bench.measures import WARM_UPS, assignment, bucket_filling, bucket_gap, wall_times_s

SMALL = ("model=tiny", "cluster=a40x16", "global_batch=32", "microbatch_size=4", "layout.dp=2")


def test_every_strategy_is_measured_at_every_size_and_every_target_names_a_case() -> None:
    assert {"entrain", "megatron"} <= set(choices("strategy"))
    assert {f"assignment_{name}_{size}" for name in choices("strategy") for size in GLOBAL_BATCHES} <= set(CASES)
    for (name, size), target in ASSIGNMENT_TARGETS.items():
        assert CASES[f"assignment_{name}_{size}"][0] == target


def test_an_assignment_stands_beside_its_iteration() -> None:
    measured = assignment(["strategy=megatron", *SMALL], repeats=3)
    assert list(measured) == ["assign_s", "iteration_time_s"]
    assert measured["assign_s"] > 0
    assert measured["iteration_time_s"] > 0


def test_buckets_are_filled_on_as_many_samples_as_the_case_says() -> None:
    measured = bucket_filling(["strategy=megatron", *SMALL], LPT, repeats=3)
    assert (measured["num_samples"], measured["num_buckets"]) == (32, 8)
    assert measured["fill_s"] > 0
    assert measured["worst_gap"] >= 0


@pytest.mark.parametrize(
    ("bucket", "gap"),
    [
        ([0, 1, 1, 0], 0.0),  # encoder 4 + 1 and 3 + 2, LLM 1 + 1 and 1 + 1: both halves of 10
        ([0, 0, 1, 1], 7 / 5 - 1),  # encoder 4 + 3
        ([1, 1, 1, 1], 10 / 5 - 1),  # an empty bucket
    ],
)
def test_the_gap_of_buckets_by_hand(bucket: list[int], gap: float) -> None:
    cost = np.array([[4.0, 1.0], [3.0, 1.0], [2.0, 1.0], [1.0, 1.0]])
    assert bucket_gap(cost, np.array(bucket), 2) == pytest.approx(gap)


def test_the_gap_is_over_the_largest_sample_where_that_is_more_than_the_mean() -> None:
    assert bucket_gap(np.array([[1.0, 9.0], [1.0, 1.0]]), np.array([0, 1]), 2) == 0.0
    assert bucket_gap(np.array([[1.0, 9.0], [1.0, 1.0]]), np.array([0, 0]), 2) == pytest.approx(10 / 9 - 1)


def test_warm_ups_are_not_timed_and_every_call_has_its_number() -> None:
    seen: list[int] = []
    assert len(wall_times_s(seen.append, repeats=4)) == 4
    assert seen == list(range(WARM_UPS + 4))


def test_long_calls_are_repeated_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("entrain_bench.lab.bench.measures.LONG_S", 0.0)
    assert len(wall_times_s(lambda _: None, repeats=20)) == 3


def test_an_unknown_case_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--case", "assignment_entrian_512"]) == 2
    assert "did you mean assignment_entrain_512?" in capsys.readouterr().err


def test_a_case_that_fails_is_named_and_the_others_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(name: str) -> dict[str, float]:
        if name == "lpt_synthetic":
            raise RuntimeError("out of luck")
        return {"assign_s": 0.5}

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("entrain_bench.lab.bench.__main__.measure_apart", measure)
    assert main([]) == 1
    assert "lpt_synthetic: out of luck" in capsys.readouterr().err
    cases = json.loads((tmp_path / "results" / "bench.json").read_text())["cases"]
    assert set(cases) == set(CASES) - {"lpt_synthetic"}
    assert cases["assignment_entrain_512"] == {"target": "assign_s <= 0.020", "assign_s": 0.5}


@pytest.mark.slow
def test_a_sweep_is_timed_to_its_first_result_and_to_its_end() -> None:
    measured = everyday.sweep(3, TINY)
    assert 0 < measured["first_result_s"] < measured["total_s"]
    assert 0 < measured["experiment_s"] < measured["total_s"]


@pytest.mark.wide
def test_a_command_that_fails_is_no_measurement() -> None:
    with pytest.raises(RuntimeError, match=r"figures no_such_figure .* ended with 2"):
        everyday.figures(["no_such_figure"])


@pytest.mark.wide
def test_memory_is_read_after_a_fifth_of_the_cells_and_after_all() -> None:
    measured = everyday.memory(5, TINY)
    assert 0 < measured["after_a_fifth_mb"] <= measured["after_all_mb"]
    assert measured["growth"] == pytest.approx(measured["after_all_mb"] / measured["after_a_fifth_mb"] - 1)
