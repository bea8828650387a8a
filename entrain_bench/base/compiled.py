"""How a compiled loop is taken apart into functions with names, at no cost, and how several run at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from numba import config, njit

# A step of a compiled loop. LLVM puts it back into the loop, for a call would copy its arguments, seven words an array.
# It counts no references, for the loop holds every array; else each turn would count all arrays of its named tuples up
# and down (five times as slow, numba 0.68, x86-64, 2026-11). So a step must not make arrays, lists or heaps.
inlined = njit(cache=True, forceinline=True, _nrt=False)  # type: ignore[call-overload]


def in_threads(call: Callable[[int], object], count: int) -> None:
    """Call a function with 0, 1, ... ``count - 1``, in as many threads as numba may use (``NUMBA_NUM_THREADS``).

    Calls must not depend on each other, so that threads change no result; what they compute gains from threads as far
    as it is compiled with ``nogil``.
    """
    num_threads = min(config.NUMBA_NUM_THREADS, count)  # type: ignore[attr-defined]
    if num_threads < 2:
        for index in range(count):
            call(index)
        return

    def some(first: int) -> None:
        for index in range(first, count, num_threads):
            call(index)

    with ThreadPoolExecutor(num_threads) as pool:
        deque(pool.map(some, range(num_threads)), maxlen=0)  # Raises what a call has raised.
