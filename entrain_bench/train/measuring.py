"""What ranks saw of an iteration, brought to rank 0, and its metrics there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import torch
import torch.distributed as dist

from entrain_bench.arrays import FloatArray
from entrain_bench.costs.truth import CostTruth
from entrain_bench.errors import ExecutionError
from entrain_bench.program import Program
from entrain_bench.program.timeline import Timeline
from entrain_bench.records.metrics import measure
from entrain_bench.train.clock import Clock
from entrain_bench.train.compose import Composed
from entrain_bench.train.control import gather_json
from entrain_bench.train.losses import name_non_finite, total_loss
from entrain_bench.train.memory import peak_bytes
from entrain_bench.train.merge import merge_timeline
from entrain_bench.train.runtime import RankResult

# What the simulator's constants of the cluster say nothing about when ranks compute on a CPU.
OF_THE_CLUSTER = ("mfu", "lower_bound_s", "gap_to_lower_bound")


@dataclass(frozen=True, slots=True)
class Seen:
    """What one rank saw of an iteration.

    Attributes:
        rows: action, start and end of everything that it ran ``[actions, 3]``.
        losses: action and loss of the chunks whose last stage it holds.
        grad_norm: of all modules, the same on every rank.
        peak_bytes: its highest memory so far.
    """

    rows: FloatArray
    losses: list[tuple[int, float]]
    grad_norm: float
    peak_bytes: float


def see(result: RankResult, clock: Clock) -> Seen:
    """What this rank saw; waits for the device."""
    values = torch.stack([row.loss for row in result.losses]).tolist() if result.losses else []
    losses = [(row.action, value) for row, value in zip(result.losses, values, strict=True)]
    return Seen(clock.rows(), losses, result.grad_norm, peak_bytes(clock.device))


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


def metrics_of(
    composed: Composed, everyone: Sequence[Seen], truth: CostTruth, device: torch.device
) -> tuple[dict[str, float], Timeline]:
    """Metrics of an iteration and its timeline, out of what all ranks saw."""
    program, grad_norm = composed.work.program, everyone[0].grad_norm
    timeline = merge_timeline(program, [seen.rows for seen in everyone], [seen.peak_bytes for seen in everyone])
    row = measure(timeline, truth, composed.assignment_time_s)
    if device.type == "cpu":
        row = {name: value for name, value in row.items() if name not in OF_THE_CLUSTER}
    row |= {
        "loss": total_loss(program, [seen.losses for seen in everyone]),
        "grad_norm": grad_norm,
        "skipped_updates": float(not isfinite(grad_norm)),
        "exposed_assignment_time_s": composed.exposed_s,
    }
    return row, timeline
