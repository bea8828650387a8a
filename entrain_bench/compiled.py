"""How a compiled loop is taken apart into functions with names, at no cost."""

from numba import njit

# A step of a compiled loop. LLVM puts it back into the loop, for a call would copy its arguments, seven words an array.
# It counts no references, for the loop holds every array; else each turn would count all arrays of its named tuples up
# and down (five times as slow, numba 0.68, x86-64, 2026-11). So a step must not make arrays, lists or heaps.
inlined = njit(cache=True, forceinline=True, _nrt=False)  # type: ignore[call-overload]
