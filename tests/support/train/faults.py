"""Faults planted into a rank's messages and inputs: all shapes stay right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from entrain_bench.program import Program
from entrain_bench.specs.framework import Framework
from entrain_bench.train.messages.rank_plan import DEFAULTS, Message, RankPlan, plan_rank
from entrain_bench.train.modules import Pack
from entrain_bench.train.running.data import SampleData


def reverse_rows(program: Program, rank: int, framework: Framework = DEFAULTS) -> RankPlan:
    """Rows of every tensor that crosses modules in reverse: all shapes are right."""
    plan = plan_rank(program, rank, framework)
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
    labels = pack.labels.split(list(pack.lengths))
    return replace(
        pack,
        labels=torch.cat([torch.full_like(own, -1) if s == 0 else own for s, own in zip(samples, labels, strict=True)]),
    )
