"""Communication by size, timed on ranks of this machine: gloo on a CPU, NCCL on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from entrain_bench.base.arrays import FloatArray
from entrain_bench.costs.profiled.file import COLLECTIVES, CollectivePoint
from entrain_bench.specs.parse import parse
from entrain_bench.train.launching.launch import on_ranks
from entrain_bench.train.profiling.sampling import WARM_UPS, Patience, quantiles

# One after the other between two looks at the clock, so that ranks that start apart hardly count.
CALLS = 4
ELEMENT_BYTES = 4


def measure_collectives(
    device: str,
    num_ranks: int,
    message_bytes: tuple[int, ...],
    patience: Patience,
    operations: Sequence[str] = COLLECTIVES,
    cores: Sequence[int] = (),
) -> list[CollectivePoint]:
    """Time every operation at every size on ranks of this machine, pinned to ``cores``."""
    args = (device, message_bytes, patience, tuple(operations))
    points, *_ = on_ranks(_points, num_ranks, *args, device=device, cores=cores)
    return [parse(CollectivePoint, values, "collectives") for values in points]


def _points(
    device: str, message_bytes: tuple[int, ...], patience: Patience, operations: Sequence[str], group: dist.ProcessGroup
) -> list[dict[str, Any]]:
    place = torch.device(device, group.rank()) if device == "cuda" else torch.device("cpu")
    return [asdict(_point(name, size, place, patience, group)) for name in operations for size in message_bytes]


def _point(
    operation: str, num_bytes: int, device: torch.device, patience: Patience, group: dist.ProcessGroup
) -> CollectivePoint:
    size = group.size()
    # Every rank holds a share of equal size.
    share = max(1, num_bytes // (ELEMENT_BYTES * size))
    whole = torch.zeros(share * size, device=device)
    part = torch.zeros(share, device=device)
    call = _calls_of(group.rank(), whole, part)[operation]
    warm = _sample(call, WARM_UPS, device, group)
    wanted = int(patience.point_s / (CALLS * max(float(warm.min()), 1e-6)))
    # All ranks must agree.
    count = torch.tensor([min(max(wanted, patience.least), patience.most)])
    dist.broadcast(count, 0, group=group)
    seconds = _sample(call, int(count), device, group) / (2 if operation == "send" else 1)
    return CollectivePoint(operation, size, share * size * ELEMENT_BYTES, quantiles(seconds), len(seconds))


def _calls_of(rank: int, whole: Tensor, part: Tensor) -> dict[str, Callable[[], object]]:
    def send() -> None:
        # There and back: one transfer is half of it.
        for passed in (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send):
            passed(whole, 1 - rank)

    return {
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "all_reduce": lambda: dist.all_reduce(whole),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "send": send if rank < 2 else lambda: None,
    }


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
