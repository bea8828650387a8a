"""Processes of this machine, joined by a gloo group, that measure two ways of doing the same."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch.distributed as dist

TIMEOUT_S = 120.0
WARM_UPS = 3


def on_ranks(
    function: Callable[..., dict[str, float]], num_ranks: int, *args: Any, cores: Sequence[int] = ()
) -> list[dict[str, float]]:
    """Call ``function(*args, group of all ranks)`` in a process for each rank; what they return, by rank.

    Args:
        function: what ranks do.
        num_ranks: ranks.
        *args: of the function.
        cores: those that ranks are pinned to, taking turns; none pins nobody.
    """
    with TemporaryDirectory() as folder, ProcessPoolExecutor(num_ranks, get_context("spawn")) as pool:
        store = Path(folder) / "store"
        ranks = [pool.submit(_joined, rank, num_ranks, store, function, args, cores) for rank in range(num_ranks)]
        return [rank.result() for rank in ranks]


def pin(cores: Sequence[int], index: int) -> None:
    """Keep this process, and the threads it starts from now on, on one of the cores, where the system can do that."""
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {cores[index % len(cores)]})


def _joined(
    rank: int,
    num_ranks: int,
    store: Path,
    function: Callable[..., dict[str, float]],
    args: tuple[Any, ...],
    cores: Sequence[int],
) -> dict[str, float]:
    pin(cores, rank)
    # A machine with GPUs is measured on its CPU like any other.
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", f"file://{store}", timeout=timeout, rank=rank, world_size=num_ranks)
    try:
        return function(*args, dist.new_group(backend="gloo", timeout=timeout))
    finally:
        dist.destroy_process_group()


class Turns:
    """Times calls that take turns, and take turns at being first; collective.

    Args:
        control: a gloo group of all ranks.
    """

    def __init__(self, control: dist.ProcessGroup) -> None:
        self.control = control
        self.times: list[dict[str, float]] = []

    def take[T](self, calls: Mapping[str, Callable[[], T]]) -> dict[str, T]:
        """Make each call once, from barrier to barrier; what they return, by name."""
        results: dict[str, T] = {}
        times: dict[str, float] = {}
        for name in sorted(calls, reverse=len(self.times) % 2 == 1):
            dist.barrier(group=self.control)
            started = perf_counter()
            results[name] = calls[name]()
            dist.barrier(group=self.control)
            times[name] = perf_counter() - started
        self.times.append(times)
        return results

    def seconds(self) -> dict[str, float]:
        """Median and shortest time of each, without the calls that warmed up."""
        timed = {name: [times[name] for times in self.times[WARM_UPS:]] for name in self.times[0]}
        return {
            **{f"{name}_s": median(seconds) for name, seconds in timed.items()},
            **{f"{name}_shortest_s": min(seconds) for name, seconds in timed.items()},
        }
