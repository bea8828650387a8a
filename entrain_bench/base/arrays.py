"""Array types and the few CSR operations everything is built on."""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

type IntArray = NDArray[np.integer]
type FloatArray = NDArray[np.float64]
type BoolArray = NDArray[np.bool_]
type TextArray = NDArray[np.object_]


def offsets_from_counts(counts: IntArray) -> NDArray[np.int64]:
    """Row offsets ``[rows + 1]`` of a CSR structure with the given number of entries per row."""
    offsets = np.zeros(len(counts) + 1, np.int64)
    counts.cumsum(out=offsets[1:])
    return offsets


def rows_of(offsets: IntArray) -> NDArray[np.int64]:
    """Row index of every CSR entry ``[entries]``."""
    return np.arange(len(offsets) - 1).repeat(offsets[1:] - offsets[:-1])


def take_rows(offsets: IntArray, rows: IntArray) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """New offsets of the chosen rows ``[len(rows) + 1]``, and the positions of their entries in the old structure."""
    first = offsets[rows]
    counts = offsets[rows + 1] - first
    new_offsets = offsets_from_counts(counts)
    positions = (first - new_offsets[:-1]).repeat(counts) + np.arange(new_offsets[-1])
    return new_offsets, positions


def sum_rows(offsets: IntArray, values: IntArray | FloatArray) -> FloatArray:
    """Sum of the entries of each CSR row ``[rows]``; an empty row sums to zero."""
    totals = np.zeros(len(values) + 1)
    values.cumsum(dtype=np.float64, out=totals[1:])
    bounds = totals[offsets]
    return bounds[1:] - bounds[:-1]


def sum_in_order(terms: Sequence[FloatArray], like: FloatArray) -> FloatArray:
    """Sum of arrays of one shape, first to last; zeros like the given array for none."""
    total = np.zeros_like(like)
    for term in terms:
        total = total + term
    return total


def numbered(*labels: IntArray) -> IntArray:
    """Return the number of each row's labels among all that there are, sorted; labels are at least 0 ``[rows]``."""
    key = np.zeros(len(labels[0]), np.int64)
    for label in labels:
        key = key * (int(label.max(initial=0)) + 1) + label
    return np.unique(key, return_inverse=True)[1]


def freeze(*arrays: NDArray[np.generic]) -> None:
    """Make arrays read-only, so that a frozen dataclass is frozen all the way down."""
    for array in arrays:
        array.flags.writeable = False


def digest_of(array: NDArray[np.generic]) -> tuple[tuple[int, ...], bytes]:
    """Return shape and hash of an array: a short cache key for results of its content; the data type does not count."""
    return array.shape, blake2b(np.ascontiguousarray(array), digest_size=16).digest()
