"""Errors of programs and of speedups, of records that were made up, the figure of them, and a group that is run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from entrain_bench.figures._runner import render
from entrain_bench.lab import fidelity
from entrain_bench.lab.__main__ import main
from entrain_bench.lab.fidelity import (
    COMMON,
    draw,
    measure,
    pair_rows,
    program_row,
    programs_of,
    report,
    summary,
)
from entrain_bench.records.records import Record
from entrain_bench.run.cells import compose_cells


def run_of(*seconds: float, bubble: float = 0.2) -> Record:
    """A run whose iterations took so long; the first, which warms up, does not count."""
    iterations = tuple({"iteration_time_s": took_s} for took_s in (100.0, *seconds))
    return Record("", "ok", "", {}, {}, "", metrics={"bubble_ratio": bubble}, iterations=iterations)


def test_errors_of_a_program() -> None:
    trained = [run_of(1.9, 2.0), run_of(2.0, 2.1, bubble=0.3)]
    row = program_row({"strategy": "dip"}, trained, [run_of(2.2, 2.2, bubble=0.1), run_of(2.2, 2.2, bubble=0.1)])
    assert (row["strategy"], row["repetitions_s"]) == ("dip", "[1.9, 2.0, 2.0, 2.1]")
    numbers = [row[name] for name in ("measured_s", "predicted_s", "iteration_error", "repeat_error")]
    assert numbers == pytest.approx([2.0, 2.2, 0.1, 2.05 / 1.95 - 1])
    assert (row["measured_bubble"], row["predicted_bubble"]) == pytest.approx((0.25, 0.1))


def rows_of(**times: tuple[float, float]) -> pd.DataFrame:
    """Strategies with measured and predicted seconds; repetitions differ by 1 %."""
    rows = []
    for place, (name, (measured, predicted)) in enumerate(times.items()):
        seconds = [0.99 * measured, measured, 1.01 * measured][:: 1 if place % 2 else -1]
        where = {"num_ranks": 2, "workload": "even", "seed": 0, "strategy": name}
        rows.append(program_row(where, [run_of(*seconds)], [run_of(predicted)]))
    return pd.DataFrame(rows)


def test_errors_of_gains() -> None:
    pairs = pair_rows(rows_of(slow=(2.0, 2.2), fast=(1.0, 1.0), near=(1.005, 0.9))).set_index(["slow", "fast"])
    assert pairs.loc[("slow", "fast"), "measured_speedup"] == pytest.approx(2.0, rel=1e-3)
    assert pairs.loc[("slow", "fast"), "error"] == pytest.approx(0.1, rel=1e-2)
    # Logarithms of the three ratios are 2 % apart: t(2) * 0.02 / sqrt(3) on both sides.
    low, high = pairs.loc[("fast", "near"), ["low", "high"]]
    assert np.log(high / low) / 2 == pytest.approx(4.303 * 0.02 / 3**0.5, rel=1e-3)
    # An interval around 1: no order was measured that a prediction could miss.
    assert not pairs["sign_error"].any()


def test_an_order_beyond_the_noise_is_missed() -> None:
    rows = rows_of(one=(1.0, 1.0), other=(1.1, 0.9), last=(2.0, 2.0))
    pairs = pair_rows(rows).set_index(["slow", "fast"])
    assert pairs["chance"].between(0, 0.05).all()
    assert pairs["sign_error"].to_dict() == {("one", "other"): True, ("one", "last"): False, ("other", "last"): False}
    assert summary(rows, pair_rows(rows))["kendall_tau"] == pytest.approx(1 / 3)


@pytest.mark.wide
def test_table_figure_and_verdict_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(megatron=(2.0, 2.0), dip=(1.5, 1.5), dflop=(1.0, 1.02))
    assert report(rows, tmp_path, load=0.0) == 0
    assert "num_programs" in capsys.readouterr().out
    assert len(pd.read_csv(tmp_path / "fidelity.csv")) == 3
    assert (tmp_path / "figures" / "fidelity.png").stat().st_size > 10_000
    assert report(rows_of(megatron=(2.0, 0.8), dip=(1.5, 1.5), dflop=(1.0, 1.02)), tmp_path, load=0.0) == 1
    assert "missed: " in capsys.readouterr().err
    pairs = pair_rows(rows)
    assert summary(rows, pairs)["num_pairs"] == 3
    once, again = (render(lambda: draw(rows, pairs)) for _ in range(2))
    assert once == again


def test_programs_are_jobs_that_there_are_and_one_splits_weights_and_sequences() -> None:
    programs = [program for group in ((2, "even", 1), (4, "text", 0)) for program in programs_of(*group)]
    assert [name for name, *_ in programs].count("megatron_tp2_cp2") == 1
    layouts = {
        name: compose_cells([f"strategy={strategy}", *job, "harness=train"])[0].config.layout.values
        for name, strategy, job in programs
    }
    assert (layouts["megatron_tp2_cp2"]["tp"], layouts["megatron_tp2_cp2"]["cp"]) == (2, 2)


@pytest.mark.slow
def test_programs_take_turns_and_what_is_done_is_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ("model.modules.vision.num_layers=2", "model.modules.vision.full_attention_layers=[1]", "global_batch=4")
    monkeypatch.setattr(fidelity, "COMMON", (*COMMON, *small, "model.modules.llm.num_layers=2", "iterations=2"))
    monkeypatch.setattr(fidelity, "STRATEGIES", ("megatron", "dip"))
    rows = measure(2, "even", 0, 2, tmp_path)
    assert [row["strategy"] for row in rows] == ["megatron", "dip"]
    assert all(0 < row["measured_bubble"] < 1 for row in rows)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    assert len(files) >= 8
    assert measure(2, "even", 0, 2, tmp_path) == rows
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")} == files


def test_bad_arguments_and_a_program_that_fails_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = Record("", "failed", "rank 1: was killed", {}, {}, "")
    monkeypatch.setattr(fidelity, "run_strategies", lambda names, *_: dict.fromkeys(names, failed))
    assert main(["fidelity", "--repeats", "0"]) == 2
    assert main(["fidelity", "--results-dir", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "--repeats=0: must be at least 1" in said
    assert "2_even_0_dip: rank 1: was killed" in said
