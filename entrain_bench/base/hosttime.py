"""Host time to make a program: measured on this machine, and estimated for the hosts of a cluster."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter


@dataclass(slots=True)
class HostTime:
    """Seconds on this machine for all replicas, and the seconds saved if each host works for one replica only."""

    total_s: float = 0.0
    spread_s: float = 0.0

    def exposed_s(self, iteration_time_s: float) -> float:
        """Return the seconds that ranks wait for a program, which is made during the iteration before."""
        return max(0.0, self.total_s - self.spread_s - iteration_time_s)


_CURRENT: ContextVar[HostTime | None] = ContextVar("host_time", default=None)


@contextmanager
def stopwatch() -> Iterator[HostTime]:
    """Times the body of a ``with`` statement: ``total_s`` at its end."""
    time = HostTime()
    started = perf_counter()
    token = _CURRENT.set(time)
    try:
        yield time
    finally:
        _CURRENT.reset(token)
        time.total_s = perf_counter() - started


@contextmanager
def each_replica_alone(num_replicas: int) -> Iterator[None]:
    """Time work for all replicas as if each host did its own replica in parallel."""
    started = perf_counter()
    try:
        yield
    finally:
        if time := _CURRENT.get():
            time.spread_s += (perf_counter() - started) * (1 - 1 / num_replicas)


def host_name() -> str:
    """Return processor and number of cores of this machine, on which host times are measured."""
    return f"{processor_name()}, {os.cpu_count()} cores"


def processor_name() -> str:
    """The processor's model name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
