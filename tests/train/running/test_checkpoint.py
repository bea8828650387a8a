"""Checkpoints continue exactly, under any layout, and only their own run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from entrain_bench.base.errors import UserError
from entrain_bench.train.device import prepare_platform
from entrain_bench.train.running.checkpoint import Checkpoints
from support.train.ranks import run_ranks
from support.train.runs import DISJOINT, ONE_RANK, configuration, train_here

SCHEDULE = ("harness.warmup_iterations=2", "harness.learning_rate_decay=cosine", "harness.decay_iterations=5")
FOUR_ITERATIONS = (*DISJOINT, "iterations=4", "distributed_optimizer=true", "harness.epsilon=1e-8", *SCHEDULE)


def _in_halves(_: int, config: str, folder: Path) -> None:
    """Train whole, and in two halves."""
    whole = train_here(config)
    half, rest = (_into(config, folder, iterations) for iterations in (2, 4))
    # What was done is not done again.
    assert [row["loss"] for row in train_here(half)] == [row["loss"] for row in train_here(half)]
    again = train_here(rest)
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in again] == [row[key] for row in whole], key


def _checkpoints(rank: int, config: str, folder: Path) -> dict[str, str]:
    """Train in two halves; what is refused then, by case."""
    _in_halves(rank, config, folder)
    last = _into(config, folder, 4)
    changed = {
        "seed": last.replace('"seed": 0', '"seed": 1'),
        "dtype": last.replace('"dtype": "float32"', '"dtype": "bfloat16"'),
        "short": _into(config, folder, 3),
    }
    refused = {name: _refusal(config) for name, config in changed.items()}
    stored = folder / "iteration_00000004"
    first, second, *_ = sorted(stored.glob("shard-*.safetensors"))
    content = first.read_bytes()
    for name, path, harm in (
        ("cut", first, lambda: first.write_bytes(content[: len(content) // 2])),
        # Torch would take what is left for the whole.
        ("missing", second, second.unlink),
        ("zeros", first, lambda: first.write_bytes(bytes(len(content)))),
        ("meta", stored / "meta.json", lambda: (stored / "meta.json").write_text('{"format": ')),
    ):
        kept = path.read_bytes()
        dist.barrier()
        if rank == 0:
            harm()
        dist.barrier()
        refused[name] = _refusal(last)
        dist.barrier()
        if rank == 0:
            path.write_bytes(kept)
    return refused


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


@pytest.mark.wide
def test_checkpoints_continue_exactly_and_only_their_own_run(tmp_path: Path) -> None:
    for found in run_ranks(_checkpoints, 4, configuration(*FOUR_ITERATIONS, "harness.dtype=float32"), tmp_path):
        assert "its checkpoint has another seed (0; this run has 1)" in found["seed"]
        assert "its checkpoint has another dtype (float32; this run has bfloat16)" in found["dtype"]
        assert found["short"] == "iterations=3: must be at least the 4 of the checkpoint"
        for harm in ("cut", "missing", "zeros", "meta"):
            assert found[harm].endswith("checkpoint iteration_00000004 is damaged. Remove it"), harm


@pytest.mark.slow
def test_half_precision_continues_exactly(tmp_path: Path) -> None:
    run_ranks(_in_halves, 4, configuration(*FOUR_ITERATIONS, "harness.dtype=bfloat16"), tmp_path)


OTHERS = {
    "pp4": ("layout.dp=1", "layout.pp=4"),
    "tp2": ("layout.tp=2", "layout.pp=1", "distributed_optimizer=false"),
    "fsdp": ("strategy=fsdp", "layout.tp=1", "layout.dp=4", "layout.pp=null"),
    "first": (),
}
EXPERTS = {
    "ep4": ("model=tiny_moe", "layout.dp=4", "layout.pp=1", "layout.ep=4"),
    "ep2": ("model=tiny_moe", "layout.ep=2"),
    "first": ("model=tiny_moe", "layout.ep=1"),
}


_resume = Checkpoints.resume


def _resume_without_pickle(*args: Any) -> Any:
    refuse = AssertionError("unpickled")
    with (
        patch("pickle.load", side_effect=refuse),
        patch("pickle.loads", side_effect=refuse),
        patch("torch.load", side_effect=refuse),
        patch.object(distributed_c10d, "_tensor_to_object", side_effect=refuse),
    ):
        return _resume(*args)


def _from_layout_to_layout(_: int, configs: dict[str, str], folder: Path) -> list[list[dict[str, float]]]:
    """All iterations under the first layout; and two iterations under each, one after the other."""
    prepare_platform()
    with patch.object(Checkpoints, "resume", _resume_without_pickle):
        whole = train_here(_into(configs["first"], folder / "whole", 2 * len(configs)))
        for number, config in enumerate(configs.values(), start=1):
            moving = train_here(_into(config, folder / "moving", 2 * number))
    return [whole, moving]


@pytest.mark.parametrize(
    ("others", "dtype", "tolerance"),
    [
        pytest.param(OTHERS, "float32", 1e-5, marks=pytest.mark.wide),
        pytest.param(EXPERTS, "float32", 1e-5, marks=pytest.mark.wide),
        pytest.param(OTHERS, "bfloat16", 2e-2, marks=pytest.mark.slow),
    ],
)
def test_a_run_resumes_under_another_layout_and_unpickles_no_file(
    tmp_path: Path, others: dict[str, tuple[str, ...]], dtype: str, tolerance: float
) -> None:
    common = (*DISJOINT, "distributed_optimizer=true", f"harness.dtype={dtype}")
    configs = {name: configuration(*common, *changes) for name, changes in others.items()}
    whole, moving = run_ranks(_from_layout_to_layout, 4, configs, tmp_path, stay=False)[0]
    assert len(moving) == 2 * len(others)
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in moving] == pytest.approx([row[key] for row in whole], rel=tolerance), key
    last = f"iteration_{2 * len(others):08d}"
    assert (tmp_path / "moving" / last / "meta.json").exists()
    assert [path.name for path in (tmp_path / "moving").iterdir()] == [last]


@pytest.mark.wide
def test_other_content_of_a_folder_stays(tmp_path: Path) -> None:
    run_ranks(_keep_content, 1, configuration(*ONE_RANK), tmp_path)


def _keep_content(_: int, config: str, folder: Path) -> None:
    prepare_platform()
    train_here(_into(config, folder, 2))
    others = [folder / "iteration_last.txt", folder / "iteration_00000001" / "meta.json", folder / "mine" / "a"]
    others.append(folder / "iteration_00000002" / "notes.txt")
    for file in others:
        file.parent.mkdir(exist_ok=True)
        file.write_text("{}")
    train_here(_into(config, folder, 4))
    assert all(file.read_text() == "{}" for file in others)
    assert [path.name for path in (folder / "iteration_00000002").iterdir()] == ["notes.txt"]
    assert (folder / "iteration_00000004" / "meta.json").exists()
