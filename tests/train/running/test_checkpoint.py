"""Checkpoints continue exactly, and only their own run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from entrain_bench.errors import UserError
from support.train.ranks import run_ranks
from support.train.runs import DISJOINT, configuration, train_here

FOUR_ITERATIONS = (
    *DISJOINT,
    "iterations=4",
    "distributed_optimizer=true",
    "harness.epsilon=1e-8",
    "harness.dtype=float32",
)


def _in_halves(_: int, config: str, folder: Path) -> None:
    """Train whole, and in two halves."""
    whole = train_here(config)
    half, rest = (_into(config, folder, iterations) for iterations in (2, 4))
    # What was done is not done again.
    assert [row["loss"] for row in train_here(half)] == [row["loss"] for row in train_here(half)]
    again = train_here(rest)
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in again] == [row[key] for row in whole], key


def _checkpoints(rank: int, configs: dict[str, str], folder: Path) -> dict[str, str]:
    """Train in two halves; what is refused then, by case."""
    _in_halves(rank, configs["float32"], folder / "float32")
    last = _into(configs["float32"], folder / "float32", 4)
    changed = {
        "seed": last.replace('"seed": 0', '"seed": 1'),
        "dtype": last.replace('"dtype": "float32"', '"dtype": "bfloat16"'),
        "layout": _into(configs["other layout"], folder / "float32", 4),
        "short": _into(configs["float32"], folder / "float32", 3),
    }
    found = {name: _refusal(config) for name, config in changed.items()}
    stored = folder / "float32" / "iteration_00000004"
    for name, path in (("damaged data", next(iter(sorted(stored.glob("*.distcp"))))), ("meta", stored / "meta.json")):
        dist.barrier()
        if rank == 0:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        dist.barrier()
        found[name] = _refusal(last)
    return found


def _into(config: str, folder: Path, iterations: int) -> str:
    values = json.loads(config)
    values["harness"] |= {"checkpoint_dir": str(folder), "checkpoint_every": 2}
    return json.dumps(values | {"iterations": iterations})


def _refusal(config: str) -> str:
    try:
        train_here(config)
    except UserError as error:
        return str(error)
    return "went on"


def test_checkpoints_continue_exactly_and_only_their_own_run(tmp_path: Path) -> None:
    configs = {
        "float32": configuration(*FOUR_ITERATIONS),
        "other layout": configuration(*FOUR_ITERATIONS, "layout.dp=1", "layout.pp=4"),
    }
    for found in run_ranks(_checkpoints, 4, configs, tmp_path):
        assert "its checkpoint is of another seed (0; this run has 1)" in found["seed"]
        assert "its checkpoint is of another dtype (float32; this run has bfloat16)" in found["dtype"]
        assert "its checkpoint is of another layout" in found["layout"]
        assert found["short"] == "iterations=3: must be at least the 4 of the checkpoint"
        assert found["damaged data"].endswith("damaged checkpoint iteration_00000004; remove it")
        assert found["meta"].endswith("damaged checkpoint iteration_00000004; remove it")


@pytest.mark.slow
def test_half_precision_continues_exactly(tmp_path: Path) -> None:
    run_ranks(_in_halves, 4, configuration(*FOUR_ITERATIONS, "harness.dtype=bfloat16"), tmp_path)
