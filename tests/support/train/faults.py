"""Faults planted into a rank's messages, inputs and weight passes: all shapes stay right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from entrain_bench.program import Program
from entrain_bench.train.messages.rank_plan import Message, RankPlan, plan_rank
from entrain_bench.train.modules import split
from entrain_bench.train.modules.packing import Pack
from entrain_bench.train.modules.split import WeightPass
from entrain_bench.train.running.data import SampleData
from entrain_bench.train.running.stages import TrainedStage


def reverse_rows(program: Program, *given: Any) -> RankPlan:
    """Rows of every tensor that crosses modules in reverse: all shapes are right."""
    plan = plan_rank(program, *given)
    steps = [replace(step, receives=tuple(_reversed(m, program) for m in step.receives)) for step in plan.steps]
    return replace(plan, steps=tuple(steps))


def _reversed(message: Message, program: Program) -> Message:
    if program.module[message.source] == program.module[message.target]:
        return message
    rows = message.target_rows
    places = np.arange(message.num_rows) + (rows.start if isinstance(rows, slice) else 0)
    return replace(message, target_rows=(rows if isinstance(rows, np.ndarray) else places)[::-1].copy())


def drop_sample(data: SampleData, samples: np.ndarray, original: Callable[..., Pack] = SampleData.llm_pack) -> Pack:
    """The first sample of the batch predicts nothing."""
    pack = original(data, samples)
    sample = np.repeat(samples, pack.lengths)
    return replace(pack, labels=torch.where(torch.from_numpy(sample == 0), -1, pack.labels))


_backward_weights: Callable[..., None] = TrainedStage.backward_weights


def skip_weights(trained: TrainedStage, left: WeightPass, **which: bool) -> None:
    """Only the last weight pass of a stage runs."""
    if which["last"]:
        _backward_weights(trained, left, **which)


def repeat_weights(trained: TrainedStage, left: WeightPass, **which: bool) -> None:
    """Weight passes count twice."""
    twice = WeightPass({parameter: 2 * parts for parameter, parts in left.left.items()})
    _backward_weights(trained, twice, **which)


class OtherInputs:
    """Weight passes take the inputs of the chunk before, as far as they are as long."""

    def __init__(self) -> None:
        self.original, self.before = split._gradient_of_product, {}

    def __call__(self, gradient: torch.Tensor, rows: torch.Tensor, arrival: object) -> torch.Tensor:
        if arrival is not None:
            arrival.wait()
        key = gradient.shape[1:], rows.shape[1:]
        other = self.before.get(key, rows)
        self.before[key] = rows
        taken = rows.clone()
        shared = min(len(rows), len(other))
        taken[:shared] = other[:shared]
        return self.original(gradient, taken, None)
