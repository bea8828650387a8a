"""``torch.profiler`` on request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch.profiler import profile

# The iteration that is profiled: the first after the one that warms up.
PROFILED_ITERATION = 1


@contextmanager
def profiler(folder: str | None, iteration: int) -> Iterator[None]:
    """Trace one iteration of each rank into ``<folder>/rank<r>.json``; does nothing in others or without a folder."""
    if folder is None or iteration != PROFILED_ITERATION:
        yield
        return
    with profile() as trace:
        yield
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    trace.export_chrome_trace(str(path / f"rank{dist.get_rank()}.json"))
