"""Programs trained on ranks and predicted, their errors, of files that were made up, and the figure of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from entrain_bench.figures._runner import render
from entrain_bench.lab.__main__ import main
from entrain_bench.lab.fidelity.command import measure, report
from entrain_bench.lab.fidelity.comparison import draw, pair_rows, rank_correlations, summary
from entrain_bench.lab.fidelity.predict import all_rows, mean_of, program_row
from entrain_bench.lab.fidelity.programs import COMMON, SPLIT, FidelityProgram, first_program, overrides_of
from entrain_bench.program import Pass
from entrain_bench.run.cells import compose_cells
from entrain_bench.simulate import Simulator
from entrain_bench.train.emulate import lane_orders

LINKS = {"latency_s": 1e-5, "bandwidth_bytes_per_s": 1e12}


def program_of(strategy: str, folder: Path, measured_s: float, predicted_s: float) -> FidelityProgram:
    """A program whose files say that its simulated timeline took that long, the measured one give or take 1 %."""
    (cell,) = compose_cells(overrides_of(2, "even", 0, strategy))
    setting, program = first_program(cell.config)
    one = FidelityProgram(2, "even", 0, strategy, cell.config, program)
    timeline = Simulator(setting.truth, 1e12).execute(program)
    start, end = (column / timeline.iteration_time_s for column in (timeline.start_s, timeline.end_s))
    took = np.where(program.kind <= Pass.BACKWARD, end - start, 0.0)
    columns = {"start_s": start, "end_s": end, "cpu_s": took}
    predicted = {name: (predicted_s * column).tolist() for name, column in columns.items() if name != "cpu_s"}
    predicted |= {"work_s": (predicted_s * took).tolist(), "peak_bytes": 90.0}
    folder.mkdir(exist_ok=True)
    (folder / "links.json").write_text(json.dumps(LINKS))
    for half, repetitions in (("before", [0.99, 0.99, 1.0]), ("after", [1.0, 1.01, 1.01])):
        factors = np.array(repetitions)[:, None] * measured_s
        measured = {name: (factors * column).tolist() for name, column in columns.items()}
        (folder / f"{one.key}.{half}.json").write_text(json.dumps(measured | {"peak_bytes": 100.0}))
    (folder / f"{one.key}.emulated.json").write_text(json.dumps(predicted))
    return one


def test_errors_of_a_program(tmp_path: Path) -> None:
    one = program_of("megatron", tmp_path, measured_s=2.0, predicted_s=2.2)
    (row,) = all_rows([one], tmp_path).to_dict("records")
    assert row["measured_s"] == pytest.approx(2.0)
    assert row["noise"] == pytest.approx(0.00375 * 2)
    assert row["repeat_error"] == pytest.approx(1.01 / 0.99 - 1)
    for name in ("iteration_error", "core_error", "action_bias", "action_error"):
        assert row[name] == pytest.approx(0.1)
    assert row["memory_error"] == pytest.approx(-0.1)
    assert row["measured_bubble"] == pytest.approx(row["predicted_bubble"])
    assert row["measured_bubble"] > 0.1
    # Placed again with next to free messages, passes that took as long end as early, or a little earlier.
    assert -0.05 < row["replay_error"] <= 1e-9


def test_a_program_without_its_files_is_left_out(tmp_path: Path) -> None:
    one = program_of("megatron", tmp_path, 1.0, 1.0)
    (tmp_path / f"{one.key}.emulated.json").unlink()
    assert all_rows([one], tmp_path).empty


def rows_of(**times: tuple[float, float]) -> pd.DataFrame:
    """Strategies with measured and predicted seconds; repetitions differ by 1 %."""
    common = {"num_ranks": 2, "workload": "even", "seed": 0}
    return pd.DataFrame(
        program_row(
            {**common, "strategy": name},
            "llm tp1",
            measured,
            predicted,
            [0.99 * measured, measured, 1.01 * measured][:: 1 if place % 2 else -1],
        )
        for place, (name, (measured, predicted)) in enumerate(times.items())
    )


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
    assert rank_correlations(rows).tolist() == pytest.approx([1 / 3])


@pytest.mark.wide
def test_table_figure_and_verdict_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "fidelity"
    programs = [
        program_of("megatron", folder, 2.0, 2.0),
        program_of("dip", folder, 1.5, 1.5),
        program_of("dflop", folder, 1.0, 1.02),
    ]
    assert report(all_rows(programs, folder), tmp_path, load=0.0) == 0
    assert "num_programs" in capsys.readouterr().out
    assert len(pd.read_csv(tmp_path / "fidelity.csv")) == 3
    assert (tmp_path / "figures" / "fidelity.png").stat().st_size > 10_000
    programs[0] = program_of("megatron", folder, 2.0, 0.8)
    assert report(all_rows(programs, folder), tmp_path, load=0.0) == 1
    assert "missed: " in capsys.readouterr().err


@pytest.mark.wide
def test_the_same_rows_give_the_same_figure(tmp_path: Path) -> None:
    rows = all_rows([program_of("megatron", tmp_path, 2.0, 2.1), program_of("dip", tmp_path, 1.5, 1.6)], tmp_path)
    pairs = pair_rows(rows)
    assert summary(rows, pairs)["num_pairs"] == 1
    once, again = (render(lambda: draw(rows, pairs)) for _ in range(2))
    assert once == again


def test_bad_arguments_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fidelity", "--repeats", "0"]) == 2
    assert "--repeats=0: must be at least 1" in capsys.readouterr().err


SMALL = ("model.modules.vision.num_layers=2", "model.modules.vision.full_attention_layers=[1]", "global_batch=4")


def small_program(strategy: str) -> FidelityProgram:
    (cell,) = compose_cells(
        [
            *COMMON,
            *SMALL,
            "model.modules.llm.num_layers=2",
            "layout.dp=1",
            "harness.num_ranks=2",
            f"strategy={strategy}",
        ]
    )
    _, program = first_program(cell.config)
    return FidelityProgram(2, "even", 0, strategy, cell.config, program)


@pytest.mark.parametrize("strategy", SPLIT)
def test_every_rank_of_a_group_that_splits_weights_and_sequences_is_emulated(strategy: str) -> None:
    (cell,) = compose_cells(overrides_of(4, "text", 0, strategy))
    _, program = first_program(cell.config)
    assert {(placed.tp, placed.cp) for placed in program.layout.modules} == {(2, 2)}
    assert [order.num_ranks for order in lane_orders(program)] == [4]


def test_a_program_is_named_by_what_it_runs() -> None:
    one, same, other = small_program("megatron"), small_program("megatron"), small_program("dip")
    assert one.key == same.key
    assert one.key.rsplit("_")[-1] != other.key.rsplit("_")[-1]


@pytest.mark.slow
def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    programs = [small_program("megatron"), small_program("dip")]
    measure(programs, 2, tmp_path, [0, 0])
    files = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(files) == 1 + 3 * len(programs)
    measured = json.loads((tmp_path / f"{programs[0].key}.after.json").read_text())
    columns = [np.array(measured[name]) for name in ("start_s", "end_s", "cpu_s")]
    assert all(column.shape == (2, programs[0].program.num_actions) for column in columns)
    assert np.all(columns[1] >= columns[0])
    measure(programs, 2, tmp_path, [0, 0])
    assert files == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    rows = all_rows(programs, tmp_path)
    # Two ranks on one core: wall time says little on a machine in use, the processor's seconds do.
    assert rows["action_error"].max() < 1.0
    assert rows["memory_error"].abs().max() < 1.0


def test_what_several_processes_measured_is_averaged() -> None:
    assert mean_of([{("a",): 1.0, ("b",): 3.0}, {("a",): 2.0}]) == {("a",): 1.5, ("b",): 3.0}
