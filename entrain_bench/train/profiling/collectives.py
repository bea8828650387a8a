"""Communication by size, timed on ranks of this machine: gloo on a CPU, NCCL on GPUs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from entrain_bench.base.arrays import FloatArray
from entrain_bench.costs.profiled.points import COLLECTIVES, CollectivePoint
from entrain_bench.specs.parse import parse
from entrain_bench.train.launching.launch import Crew, run_on_ranks
from entrain_bench.train.messages.control import process_group
from entrain_bench.train.profiling.sampling import WARM_UPS, Patience, quantiles

TIMEOUT_S = 120.0
# One after the other between two looks at the clock, so that ranks that start apart hardly count.
CALLS = 4
ELEMENT_BYTES = 4


@dataclass(frozen=True, slots=True)
class CollectiveJob:
    """What a rank measures."""

    device: str
    message_bytes: tuple[int, ...]
    patience: Patience

    def __call__(self, work: Path, report: Callable[[int], None]) -> None:
        """Measure; rank 0 leaves the points in the folder."""
        rank = dist_rank()
        device = torch.device(self.device, rank) if self.device == "cuda" else torch.device("cpu")
        points = []
        with process_group(device, TIMEOUT_S) as control:
            for operation in COLLECTIVES:
                for num_bytes in self.message_bytes:
                    points.append(self._point(operation, num_bytes, device, control))
                    report(len(points))
        if rank == 0:
            (work / "points.json").write_text(json.dumps([asdict(point) for point in points]))

    def _point(
        self, operation: str, num_bytes: int, device: torch.device, control: dist.ProcessGroup
    ) -> CollectivePoint:
        size = control.size()
        # Every rank holds a share of equal size.
        share = max(1, num_bytes // (ELEMENT_BYTES * size))
        whole, part = torch.zeros(share * size, device=device), torch.zeros(share, device=device)
        call = calls_of(control.rank(), whole, part)[operation]
        warm = _sample(call, WARM_UPS, device, control)
        wanted = int(self.patience.point_s / (CALLS * max(float(warm.min()), 1e-6)))
        # All ranks must agree.
        count = torch.tensor([min(max(wanted, self.patience.least), self.patience.most)])
        dist.broadcast(count, 0, group=control)
        seconds = _sample(call, int(count), device, control)
        if operation == "send":
            seconds = seconds / 2
        return CollectivePoint(operation, size, share * size * ELEMENT_BYTES, quantiles(seconds), len(seconds))


def measure_collectives(
    device: str, num_ranks: int, message_bytes: tuple[int, ...], patience: Patience, progress: Callable[[int], None]
) -> list[CollectivePoint]:
    """Points of every operation and size on so many ranks of this machine.

    Raises:
        ExecutionError: if a rank fails.
    """
    job = CollectiveJob(device, message_bytes, patience)
    return run_on_ranks(job, Crew(device, num_ranks, TIMEOUT_S), {}, _read, progress)


def calls_of(rank: int, whole: Tensor, part: Tensor) -> dict[str, Callable[[], object]]:
    """Every operation by name, on a tensor and a rank's share of it; ranks beyond the first two do not send."""

    def send() -> None:
        # There and back: one transfer is half of it.
        if rank == 0:
            dist.send(whole, 1)
            dist.recv(whole, 1)
        elif rank == 1:
            dist.recv(whole, 0)
            dist.send(whole, 0)

    return {
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "all_reduce": lambda: dist.all_reduce(whole),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "send": send,
    }


def dist_rank() -> int:
    """This process's rank, before it joins the others."""
    return int(os.environ["RANK"])


def _sample(
    call: Callable[[], object], repetitions: int, device: torch.device, control: dist.ProcessGroup
) -> FloatArray:
    """Seconds of a call on the slowest rank ``[repetitions]``."""
    seconds = torch.zeros(repetitions, dtype=torch.float64)
    for index in range(repetitions):
        dist.barrier(group=control)
        started = perf_counter()
        for _ in range(CALLS):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds[index] = (perf_counter() - started) / CALLS
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=control)
    return np.asarray(seconds.numpy())


def _read(work: Path) -> list[CollectivePoint]:
    listed = json.loads((work / "points.json").read_text())
    return [parse(CollectivePoint, each, "collectives") for each in listed]
