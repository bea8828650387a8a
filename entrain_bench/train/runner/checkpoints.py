"""Checkpoints of a runner and the user's optimizer, which any other layout can read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch.optim import Optimizer

from entrain_bench.train.runner.runner import ProgramRunner
from entrain_bench.train.runner.trained import HubStage
from entrain_bench.train.running.checkpoint import Checkpoints


def save_checkpoint(folder: str | Path, runner: ProgramRunner, optimizer: Optimizer, iteration: int) -> None:
    """Write the state after ``iteration`` iterations, then remove older ones; collective."""
    checkpoints, stages = _of(folder, runner, optimizer)
    checkpoints.save(iteration, stages, iteration * [{}], 0)


def resume(folder: str | Path, runner: ProgramRunner, optimizer: Optimizer) -> int:
    """Load the last checkpoint of a folder; returns its number of iterations, 0 if there is none. Collective.

    ``UserError`` if the checkpoint is of another model or optimizer, or damaged.
    """
    checkpoints, stages = _of(folder, runner, optimizer)
    history, _ = checkpoints.resume(stages)
    return len(history)


def _of(
    folder: str | Path, runner: ProgramRunner, optimizer: Optimizer
) -> tuple[Checkpoints, dict[tuple[int, int], HubStage]]:
    identity = {"model": runner.job.model.name, "seed": str(runner.seed)}
    stages = {key: replace(stage, optimizer=optimizer) for key, stage in runner.stages.items()}
    return Checkpoints(Path(folder), identity, {}, runner.control, "checkpoints"), stages
