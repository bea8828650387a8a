"""Keys of rows: 64 bits for every row of made-up features, which a device expands to the row (``made_up``)."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from entrain_bench.base.arrays import IntArray

# Of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

type Words = NDArray[np.uint64]


def row_keys(seed: int, samples: IntArray, numbers: IntArray, lengths: IntArray) -> NDArray[np.int32]:
    """Two words a row ``[sum(lengths), 2]`` for items: numbers in samples, ``lengths`` rows each ``[items]``."""
    of_items = _mixed(_mixed(_mixed(_words(seed)) ^ _words(samples)) ^ _words(numbers))
    starts = np.cumsum(lengths) - lengths
    places = np.arange(int(lengths.sum())) - np.repeat(starts, lengths)
    keys = _mixed(np.repeat(of_items, lengths) ^ _words(places))
    return keys.view(np.int32).reshape(-1, 2)


def _words(values: IntArray | int) -> Words:
    return np.atleast_1d(np.asarray(values, np.int64)).view(np.uint64)


def _mixed(words: Words) -> Words:
    """A bijection of 64 bits each of whose bits depends on all bits of the argument."""
    mixed: Any = words + np.uint64(_STEP)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_FIRST)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_SECOND)
    mixed ^= mixed >> np.uint64(31)
    return cast("Words", mixed)
