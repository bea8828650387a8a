"""Chunks on groups of ranks of several widths: priced at each width for the chunks that have it, then put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields

import numpy as np

from entrain_bench.base.arrays import IntArray
from entrain_bench.costs.loads import Loads
from entrain_bench.costs.roofline import PassTimes
from entrain_bench.program.layout import ModuleLayout

# Layout of some chunks as if all had their width, what they carry, and which they are.
type Priced = Callable[[ModuleLayout, Loads, IntArray | slice], Sequence[PassTimes]]


def priced_by_width(placed: ModuleLayout, replica: IntArray, loads: Loads, priced: Priced) -> list[PassTimes]:
    """Return what ``priced`` gives for chunks at their own degrees, each first axis ``[chunks]``.

    Args:
        placed: layout of the chunks' module.
        replica: group of each chunk (``ModuleLayout.copies``) ``[chunks]``.
        loads: what the chunks carry.
        priced: times at one degree, one for each kind of layer or one for all.
    """
    if not placed.widths:
        return list(priced(placed, loads, slice(None)))
    degree = placed.degree_of_copy[replica]
    priced_rows = list[tuple[IntArray, Sequence[PassTimes]]]()
    for place in np.unique(degree).tolist() or [0]:
        rows = np.flatnonzero(degree == place)
        priced_rows.append((rows, priced(placed.at(place), loads.take(rows), rows)))
    if len(priced_rows) == 1:
        return list(priced_rows[0][1])
    rows = np.concatenate([chunk_rows for chunk_rows, _ in priced_rows])
    order = np.argsort(rows, kind="stable")
    return [_joined([times[index] for _, times in priced_rows], order) for index in range(len(priced_rows[0][1]))]


def least_times(times: Sequence[PassTimes]) -> PassTimes:
    """Return the least of each time over several degrees."""
    columns = zip(*(pass_times.columns for pass_times in times), strict=True)
    return PassTimes(*(np.minimum.reduce(column) for column in columns))


def _joined(times: Sequence[PassTimes], order: IntArray) -> PassTimes:
    """Return the rows of several times, one after the other, in the given order."""
    columns = {field.name: [getattr(part, field.name) for part in times] for field in fields(PassTimes)}
    return PassTimes(
        **{name: None if parts[0] is None else np.concatenate(parts)[order] for name, parts in columns.items()}
    )
