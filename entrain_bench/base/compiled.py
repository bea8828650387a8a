"""Compiled loops: where they are kept, how one is taken apart into named functions, and how several run at a time."""

import hashlib
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba import config


def njit[**P, Result](**options: Any) -> Callable[[Callable[P, Result]], Callable[P, Result]]:
    """Compile like ``numba.njit(cache=True)``, with a cache for each version of all loops: a loop holds its callees."""

    def decorate(function: Callable[P, Result]) -> Callable[P, Result]:
        outer = config.CACHE_DIR  # type: ignore[attr-defined]
        config.CACHE_DIR = str(_cache_of(function.__module__.partition(".")[0]))  # type: ignore[attr-defined]
        try:
            compiled: Callable[P, Result] = numba.njit(cache=True, **options)(function)
            return compiled
        finally:
            config.CACHE_DIR = outer  # type: ignore[attr-defined]

    return decorate


# A step of a compiled loop. LLVM puts it back into the loop, for a call would copy its arguments, seven words an array.
# References are not counted, for the loop holds every array; else each turn would count all arrays of its tuples up
# and down (five times as slow, numba 0.68, x86-64, 2026-11). So a step must not make arrays, lists or heaps.
inlined = njit(forceinline=True, _nrt=False)


@cache
def _cache_of(package: str) -> Path:
    """Where loops of a package are kept: by the content of its files with compiled loops and of this package's."""
    content = hashlib.sha256()
    for name in sorted({package, __name__.partition(".")[0]}):
        for folder in getattr(sys.modules[name], "__path__", ()):
            for file in sorted(Path(folder).rglob("*.py")):
                if b"njit" in (text := file.read_bytes()):
                    content.update(text)
    return Path(__file__).parent / "__pycache__" / f"compiled-{content.hexdigest()[:16]}"


def in_threads(call: Callable[[int], object], count: int) -> None:
    """Call a function with 0 to ``count - 1``, independent of each other, in numba's number of threads."""
    num_threads = min(config.NUMBA_NUM_THREADS, count)  # type: ignore[attr-defined]
    if num_threads < 2:
        for index in range(count):
            call(index)
        return

    def some(first: int) -> None:
        for index in range(first, count, num_threads):
            call(index)

    with ThreadPoolExecutor(num_threads) as pool:
        deque(pool.map(some, range(num_threads)), maxlen=0)  # Raises an exception of a call.
