"""Programs trained on ranks and predicted, with what they leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entrain_bench.lab.fidelity.command import measure
from entrain_bench.lab.fidelity.predict import all_rows, mean_of
from entrain_bench.lab.fidelity.programs import (
    COMMON,
    SPLIT,
    FidelityProgram,
    first_program,
    overrides_of,
)
from entrain_bench.run.cells import compose_cells
from entrain_bench.train.emulate import Measured, PassSeconds, lane_orders

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
    measure(programs, 2, tmp_path, [0])
    files = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(files) == 1 + 3 * len(programs)
    measured = json.loads((tmp_path / f"{programs[0].key}.after.json").read_text())
    columns = [np.array(measured[name]) for name in ("start_s", "end_s", "cpu_s")]
    assert all(column.shape == (2, programs[0].program.num_actions) for column in columns)
    assert np.all(columns[1] >= columns[0])
    measure(programs, 2, tmp_path, [0])
    assert files == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    rows = all_rows(programs, tmp_path)
    # Two ranks on one core: wall time says little on a machine in use, the processor's seconds do.
    assert rows["action_error"].max() < 1.0
    assert rows["memory_error"].abs().max() < 1.0


def test_what_several_processes_measured_is_averaged() -> None:
    work, shape = object(), object()
    several: Any = [Measured({work: PassSeconds(s, 2 * s, 4 * s)}, {shape: 3 * s}) for s in (1.0, 2.0)]  # type: ignore[dict-item]
    several.append(Measured({"other": PassSeconds(7.0, 8.0)}, {}))
    assert mean_of(several).passes == {work: PassSeconds(1.5, 3.0, 6.0), "other": PassSeconds(7.0, 8.0)}
    assert mean_of(several).optimizer_s == {shape: 4.5}
