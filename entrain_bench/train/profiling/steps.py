"""The optimizer's step, timed as training runs it: norm of the gradients, clipping, Adam."""

from __future__ import annotations

from functools import partial

import torch

from entrain_bench.costs.profiled.points import StepPoint
from entrain_bench.train.measuring.clock import Clock
from entrain_bench.train.profiling.packs import Target
from entrain_bench.train.profiling.sampling import Patience, quantiles, sample
from entrain_bench.train.profiling.stages import Bench
from entrain_bench.train.running.step import TrainedStage

# Gradients are clipped to half.
CLIP, NORM = 1.0, 2.0


def measure_step(target: Target, depth: int, bench: Bench, patience: Patience) -> StepPoint:
    """The point of a stage of so many layers."""
    trained = bench.build(target, depth)
    rows = sample(partial(_turn, trained), bench.device, patience)
    parameters = sum(parameter.numel() for parameter in trained.stage.parameters())
    return StepPoint(parameters, quantiles(rows[:, 0]), len(rows))


def _turn(trained: TrainedStage, clock: Clock) -> None:
    with torch.no_grad():
        for parameter in trained.stage.parameters():
            parameter.main_grad.normal_()  # type: ignore[attr-defined]
    with clock.action(0):
        trained.gradient_square()
        trained.step(CLIP, NORM)
