"""One memory budget for everything that is decoded: list entries, images, archives, frames, sounds, records."""

import os
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from entrain_bench.base.arrays import IntArray
from entrain_bench.base.errors import UserError, require

GIB = 2**30
# Environment variable of the budget in GiB, for trusted data.
VARIABLE = "ENTRAIN_BENCH_MEMORY_GIB"
# Bytes of an item while shapes are made.
_ITEM_BYTES = 128
# Allocators reserve more memory than requested.
_RESERVED_BYTES = GIB


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory that decoded data may take in a process."""

    num_bytes: int

    def ask(self, needed_bytes: float, what: str, error: Callable[[str], Exception]) -> None:
        """Raise ``error``, made of one line, where ``what`` would take more than the budget; call before allocating."""
        if needed_bytes > self.num_bytes:
            most = f"at most {self.num_bytes / GIB:g} ({VARIABLE})"
            raise error(f"{what} would take {needed_bytes / GIB:.1f} GiB of memory, {most}")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, the kernel refuses memory beyond the budget: files may state smaller sizes than they have."""
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        pages = Path("/proc/self/statm")
        if not pages.exists():
            yield
            return
        taken = int(pages.read_text().split()[5]) * resource.getpagesize()
        most = taken + self.num_bytes + _RESERVED_BYTES
        given = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_DATA, (min(most, *given) if given else most, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _given() -> Budget:
    text = os.environ.get(VARIABLE, "2")
    valid = re.fullmatch(r"\d+(\.\d+)?", text) is not None and float(text) > 0
    require(valid, VARIABLE, text, "GiB of memory, a number above 0")
    return Budget(round(float(text) * GIB))


BUDGET = _given()


def ask_items(counts: IntArray) -> None:
    """Raise ``UserError`` where samples have more items ``[samples]`` than the budget has room for."""
    total = int(np.sum(counts))
    BUDGET.ask(_ITEM_BYTES * total, f"workload: {total:,} items of {len(counts):,} samples", UserError)
