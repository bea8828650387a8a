"""Measurements of one rank in an iteration, and of all ranks, gathered on rank 0."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import isfinite

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from entrain_bench.base.arrays import FloatArray
from entrain_bench.base.errors import ExecutionError
from entrain_bench.program import Program
from entrain_bench.train.measuring.clock import Clock
from entrain_bench.train.messages.control import gather_json

# How many samples an error names.
MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class ChunkLoss:
    """Loss of one LLM chunk, divided by the batch's predicted tokens."""

    action: int
    loss: Tensor


@dataclass(frozen=True, slots=True)
class RankResult:
    """Losses of the LLM chunks whose last stage a rank holds, and the time that it waited for inputs of its forwards.

    ``grad_norm`` is of all modules' gradients before clipping; if it is not finite, no rank has changed its weights.
    """

    losses: tuple[ChunkLoss, ...]
    grad_norm: float
    input_stall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Seen:
    """Measurements of one rank in an iteration; losses with their actions, norm and waits as in ``RankResult``.

    ``rows`` are action, start and end of everything that it ran ``[actions, 3]``, in seconds since ``began_s`` on the
    clock of rank 0.
    """

    rows: FloatArray
    began_s: float
    losses: list[tuple[int, float]]
    grad_norm: float
    peak_bytes: float
    input_stall_s: float = 0.0


def see(result: RankResult, clock: Clock) -> Seen:
    """Read the measurements of this rank; waits for the device."""
    values = torch.stack([row.loss for row in result.losses]).tolist() if result.losses else []
    losses = [(row.action, value) for row, value in zip(result.losses, values, strict=True)]
    return Seen(clock.rows(), clock.began_s, losses, result.grad_norm, peak_bytes(clock.device), result.input_stall_s)


def gather_seen(seen: Seen, control: dist.ProcessGroup) -> list[Seen] | None:
    """Measurements of all ranks, by rank, on rank 0; None on the others. Collective."""
    # As JSON, which keeps every bit of a float: ranks unpickle nothing.
    own = {field.name: getattr(seen, field.name) for field in fields(seen)}
    everyone = gather_json(own | {"rows": seen.rows.tolist()}, control)
    if control.rank():
        return None
    return [Seen(**each | {"rows": np.array(each["rows"]).reshape(-1, 3)}) for each in everyone]


def name_non_finite(program: Program, iteration: int, losses: Sequence[Sequence[tuple[int, float]]]) -> str:
    """One line that names iteration, microbatch and samples of the first loss that is not finite."""
    for action, loss in (row for own in losses for row in own):
        if not isfinite(loss):
            view = program.view(action)
            samples = [program.shapes.name_of(sample) for sample in view.members]
            named = ", ".join(samples[:MOST_NAMED]) + (", ..." if len(samples) > MOST_NAMED else "")
            return (
                f"loss={loss} in iteration {iteration}, microbatch {view.microbatch} of replica {view.replica} "
                f"(samples {named}); harness.on_non_finite=skip goes on without its update"
            )
    return (
        f"gradient norm is not finite in iteration {iteration}, though all losses are; "
        f"harness.on_non_finite=skip goes on without its update"
    )


def check_finite(program: Program, iteration: int, seen: Seen, control: dist.ProcessGroup) -> None:
    """Raise ``ExecutionError``, naming the samples, on all ranks if a loss or a gradient is not finite. Collective."""
    if not isfinite(seen.grad_norm):
        raise ExecutionError(name_non_finite(program, iteration, gather_json(seen.losses, control)))


def peak_bytes(device: torch.device) -> float:
    """Highest memory so far: of the device's allocator, or of the whole process on a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
