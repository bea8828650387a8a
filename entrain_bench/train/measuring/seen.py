"""What one rank saw of an iteration, and what all ranks saw, brought to rank 0."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from math import isfinite

import torch
import torch.distributed as dist
from torch import Tensor

from entrain_bench.base.arrays import FloatArray
from entrain_bench.base.errors import ExecutionError
from entrain_bench.program import Program
from entrain_bench.train.measuring.clock import Clock
from entrain_bench.train.measuring.losses import name_non_finite
from entrain_bench.train.messages.control import gather_json


@dataclass(frozen=True, slots=True)
class ChunkLoss:
    """Loss of one LLM chunk, already divided by the batch's predicted tokens."""

    action: int
    loss: Tensor


@dataclass(frozen=True, slots=True)
class RankResult:
    """What the actions of a rank leave of an iteration.

    Attributes:
        losses: of the LLM chunks whose last stage it holds.
        grad_norm: norm of all modules' gradients before clipping; not finite if a loss or a gradient is not, and then
            no rank has changed its weights.
        input_stall_s: how long the rank waited for inputs of its forwards.
    """

    losses: tuple[ChunkLoss, ...]
    grad_norm: float
    input_stall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Seen:
    """What one rank saw of an iteration.

    Attributes:
        rows: action, start and end of everything that it ran, in seconds since it began ``[actions, 3]``.
        began_s: when it began, on the clock of rank 0.
        losses: action and loss of the chunks whose last stage it holds.
        grad_norm: of all modules, the same on every rank.
        peak_bytes: its highest memory so far.
        input_stall_s: how long it waited for inputs of its forwards.
    """

    rows: FloatArray
    began_s: float
    losses: list[tuple[int, float]]
    grad_norm: float
    peak_bytes: float
    input_stall_s: float = 0.0


def see(result: RankResult, clock: Clock) -> Seen:
    """What this rank saw; waits for the device."""
    values = torch.stack([row.loss for row in result.losses]).tolist() if result.losses else []
    losses = [(row.action, value) for row, value in zip(result.losses, values, strict=True)]
    peak = peak_bytes(clock.device)
    return Seen(clock.rows(), clock.began_s, losses, result.grad_norm, peak, result.input_stall_s)


def gather_seen(seen: Seen, control: dist.ProcessGroup) -> list[Seen] | None:
    """What all ranks saw, by rank, on rank 0; None on the others. Collective."""
    everyone: list[Seen] | None = [seen] * control.size() if control.rank() == 0 else None
    dist.gather_object(seen, everyone, dst=0, group=control)
    return everyone


def check_finite(program: Program, iteration: int, seen: Seen, control: dist.ProcessGroup) -> None:
    """Stop all ranks if a loss or a gradient is not finite, which every rank knows by the norm. Collective.

    Raises:
        ExecutionError: on every rank, naming iteration, microbatch and samples.
    """
    if not isfinite(seen.grad_norm):
        raise ExecutionError(name_non_finite(program, iteration, gather_json(seen.losses, control)))


def peak_bytes(device: torch.device) -> float:
    """Highest memory so far: of the device's allocator, or of the whole process on a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
