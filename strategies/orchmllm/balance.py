"""Batch post-balancing (arXiv:2503.23830): units of a micro-step dealt out to the batches of a phase."""

from __future__ import annotations

import numpy as np
from numba import njit

from entrain_bench.balancing.balancing import longest_first_by_row
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.specs.model import ModuleSpec

COSTS = ("linear", "quadratic")
# Halvings of the interval in which the least cost of the longest padded batch lies: a double has 53 bits.
BISECTIONS = 60


def unit_costs(module: ModuleSpec, tokens: IntArray, cost: str) -> FloatArray:
    """Cost of units of the given lengths ``[units]``: tokens, or forward FLOPs, quadratic where attention is."""
    if cost == "linear":
        return np.asarray(tokens, np.float64)
    return module.forward_flops(tokens)


def balanced_batches(cost: FloatArray, row: IntArray, num_batches: int, *, padded: bool) -> IntArray:
    """Batch of each unit among those of its row ``[units]``.

    Packed batches cost the sum of their units: LPT. In a padded batch every unit costs what the longest does: the row
    is sorted and cut into consecutive batches, whose dearest is as cheap as cuts can make it (bisection over its cost).

    Args:
        cost: of each unit alone, rising with its length ``[units]``.
        row: the micro-step of each unit ``[units]``.
        num_batches: batches of every row.
        padded: whether a phase pads its batches.
    """
    if not padded:
        return longest_first_by_row(cost, row, num_batches)
    rounded, batch = decisive(cost), np.zeros(len(cost), np.int64)
    for each in np.unique(row):
        mine = np.flatnonzero(row == each)
        rising = mine[np.argsort(rounded[mine], kind="stable")]
        batch[rising] = cut_padded(rounded[rising], num_batches)
    return batch


def cut_padded(rising: FloatArray, num_batches: int) -> IntArray:
    """Consecutive batches of units by rising cost, the dearest as cheap as possible ``[units]``.

    A batch costs its units times the dearest of them.
    """
    if not len(rising):
        return np.zeros(0, np.int64)
    # Nothing is cheaper than the dearest unit alone, and all in one batch is always possible.
    low, high = float(rising[-1]), float(len(rising) * rising[-1])
    if _fill(rising, low)[-1] < num_batches:
        high = low
    for _ in range(BISECTIONS if high > low else 0):
        middle = (low + high) / 2
        if _fill(rising, middle)[-1] < num_batches:
            high = middle
        else:
            low = middle
    found: IntArray = _fill(rising, high)
    return found


@njit(cache=True)
def _fill(rising, most):  # type: ignore[no-untyped-def]
    """Batch of each unit if each batch takes what it can without costing more than ``most``."""
    batch = np.empty(len(rising), np.int64)
    number, count = 0, 0
    for unit in range(len(rising)):
        if count and (count + 1) * rising[unit] > most:
            number, count = number + 1, 0
        batch[unit] = number
        count += 1
    return batch
