"""The interface of layer times, which a roofline or a device profile implements; prices of chunks of several widths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Protocol

import numpy as np

from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.costs.loads import Loads
from entrain_bench.costs.roofline import PassTimes
from entrain_bench.program.layout import ModuleLayout
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.shapes import SampleShapes


class LayerTimes(Protocol):
    """Seconds that layers take on one cluster; a longer or further sequence never makes a chunk faster."""

    @property
    def beyond(self) -> LayerTimes:
        """The same times, also for what they are only known for by going on as they end."""

    def loads(
        self,
        module: ModuleSpec,
        lengths: IntArray,
        offsets: IntArray | None = None,
        labelled: IntArray | None = None,
    ) -> Loads:
        """Return the loads of chunks of sequences with the given lengths; without offsets, each sequence is a chunk.

        ``labelled`` are their tokens with a label, by default all ``[sequences]``; only labelled heads count them.
        """

    def layers_s(self, module: ModuleSpec, loads: Loads, tp: int, cp: int, split: bool = False) -> list[PassTimes]:
        """Times of one layer of each of the module's kinds for each chunk, each ``[chunks]``; see ``stages_s``."""

    def stages_s(
        self,
        module: ModuleSpec,
        loads: Loads,
        counts: FloatArray,
        tp: int,
        cp: int,
        recompute: bool | FloatArray,
        split: bool = False,
    ) -> PassTimes:
        """Times of each chunk on each stage ``[chunks, stages]``.

        ``counts`` are layers of each kind on every stage ``[stages, kinds]``. ``recompute`` says whether backward runs
        what recomputation covers of each layer once more, or of how many layers of each kind it does ``[chunks, stages,
        kinds]``. With ``split`` weights' gradients are made in a pass of their own.
        """

    def work_s(
        self, module: ModuleSpec, loads: Loads, counts: FloatArray, tp: int, cp: int, recompute: bool
    ) -> FloatArray:
        """Least time in which each stage is through with a chunk's sequences, however packed ``[chunks, stages]``."""

    def knows(self, module: ModuleSpec, tp: int) -> bool:
        """Whether that tensor-parallel degree splits a module, and its times are known."""

    def gpu_s(self, module: ModuleSpec, loads: Loads, counts: FloatArray) -> FloatArray:
        """Least GPU time of each stage for a chunk's sequences, at any degrees ``[chunks, stages]``."""

    def optimizer_s(self, parameters: FloatArray) -> FloatArray:
        """Time of the optimizer step over parameters whose states a rank holds, of the shape given."""


def chunk_loads(
    times: LayerTimes, module: ModuleSpec, shapes: SampleShapes, units: IntArray, offsets: IntArray | None = None
) -> Loads:
    """Return the loads of a module's units, packed into chunks; without offsets, each unit is a chunk."""
    return times.loads(module, module.lengths(shapes, units), offsets, module.labelled(shapes, units))


# Layout of some chunks as if all had their width, what they carry, and which they are.
type Priced = Callable[[ModuleLayout, Loads, IntArray | slice], Sequence[PassTimes]]


def priced_by_width(placed: ModuleLayout, replica: IntArray, loads: Loads, priced: Priced) -> list[PassTimes]:
    """Return what ``priced`` gives for chunks at their own degrees, each first axis ``[chunks]``.

    ``replica`` is the group of each chunk (``ModuleLayout.copies``) ``[chunks]``.
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
    joined = dict[str, Any]()
    for field in fields(PassTimes):
        parts = [getattr(part, field.name) for part in times]
        joined[field.name] = None if parts[0] is None else np.concatenate(parts)[order]
    return PassTimes(**joined)
