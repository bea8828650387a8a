"""Time two implementations of the same work in turn, on ranks that form a process group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter

import torch.distributed as dist

WARM_UPS = 3


class Turns:
    """Times calls in turn, each first as often as the other; collective.

    Args:
        control: a gloo group of all ranks.
    """

    def __init__(self, control: dist.ProcessGroup) -> None:
        self.control = control
        self.times: list[dict[str, float]] = []

    def take[T](self, calls: Mapping[str, Callable[[], T]]) -> dict[str, T]:
        """Make each call once, from barrier to barrier, and return the results by name."""
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
        """Median and shortest time of each call in seconds, warm-ups excluded."""
        timed = {name: [times[name] for times in self.times[WARM_UPS:]] for name in self.times[0]}
        return {
            **{f"{name}_s": median(seconds) for name, seconds in timed.items()},
            **{f"{name}_shortest_s": min(seconds) for name, seconds in timed.items()},
        }
