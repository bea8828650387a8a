"""Times of layers: their interface, which a roofline or a device profile implements, and chunks of several widths."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.costs.loads import Loads
from entrain_bench.program.columns import remade_kinds
from entrain_bench.program.layout import ModuleLayout
from entrain_bench.specs.model import ModuleSpec


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Seconds of a chunk's passes, communication inside them apart; arrays of one shape."""

    forward_s: FloatArray
    forward_comm_s: FloatArray
    backward_s: FloatArray
    backward_comm_s: FloatArray
    weight_s: FloatArray | None = None  # of a split backward's weight pass, without communication; None: not split
    remade_s: FloatArray | None = None  # of the recomputed part of a layer; None: the forward
    remade_comm_s: FloatArray | None = None

    @property
    def ahead_s(self) -> FloatArray:
        """Seconds of forwards with their communication."""
        return self.forward_s + self.forward_comm_s

    @property
    def back_s(self) -> FloatArray:
        """Seconds of backwards with their communication, without weight passes."""
        return self.backward_s + self.backward_comm_s

    @property
    def again(self) -> tuple[FloatArray, FloatArray]:
        """Seconds and communication that recomputation adds to a backward of the layer."""
        if self.remade_s is None or self.remade_comm_s is None:
            return self.forward_s, self.forward_comm_s
        return self.remade_s, self.remade_comm_s

    @property
    def again_s(self) -> FloatArray:
        """Seconds that recomputation adds to a backward of the layer, with its communication."""
        ahead, comm = self.again
        return ahead + comm

    @property
    def columns(self) -> tuple[FloatArray, ...]:
        """The times of passes, without a weight pass where there is none."""
        whole = self.forward_s, self.forward_comm_s, self.backward_s, self.backward_comm_s
        return whole if self.weight_s is None else (*whole, self.weight_s)

    @property
    def total_s(self) -> FloatArray:
        """Seconds of all passes with their communication."""
        first, *others = self.columns
        return sum(others, start=first)


class Stages(NamedTuple):
    """Layers of stages, the degrees that split them, and whether backwards recompute them."""

    counts: FloatArray  # layers of each kind on every stage [stages, kinds]
    tp: int = 1
    cp: int = 1
    recompute: bool | FloatArray = False  # of all layers that can be; or how many [chunks, stages, kinds]
    groups: IntArray | None = None  # ranks of expert-parallel groups [groups, ep]; None: every rank has all experts

    def remade(self, module: ModuleSpec) -> FloatArray:
        """Layers of each kind that a backward runs forward once more ``[..., stages, kinds]``."""
        if isinstance(self.recompute, np.ndarray):
            return self.recompute
        return self.counts * [self.recompute and layer.recomputed for layer in module.kinds]


def placed_stages(module: ModuleSpec, placed: ModuleLayout, remade: IntArray | None = None) -> Stages:
    """The stages of a module; ``remade`` layers of each are recomputed unless the layout recomputes all."""
    split = placed.layers_per_stage
    chosen = None if remade is None or placed.recompute else remade_kinds(module, split, remade)
    recompute = placed.recompute if chosen is None else chosen
    return Stages(module.kind_counts(split), placed.tp, placed.cp, recompute, placed.expert_groups)


# Layout of some chunks at their group width, their loads, and their indices.
type Priced = Callable[[ModuleLayout, Loads, IntArray | slice], Sequence[PassTimes]]


def priced_by_width(placed: ModuleLayout, replica: IntArray, loads: Loads, priced: Priced) -> list[PassTimes]:
    """Return ``priced`` for chunks at the degrees of their groups ``replica``, each first axis ``[chunks]``."""
    if not placed.widths:
        return list(priced(placed, loads, slice(None)))
    degree = placed.degree_of_copy[replica]
    degrees = np.unique(degree).tolist() or [0]
    rows = [np.flatnonzero(degree == place) for place in degrees]
    times = [priced(placed.at(place), loads.take(chunks), chunks) for place, chunks in zip(degrees, rows, strict=True)]
    if len(times) == 1:
        return list(times[0])
    order = np.argsort(np.concatenate(rows), kind="stable")
    return [_joined(parts, order) for parts in zip(*times, strict=True)]


def least_times(times: Sequence[PassTimes]) -> PassTimes:
    """Return the least of each time over several degrees."""
    columns = zip(*(pass_times.columns for pass_times in times), strict=True)
    return PassTimes(*(np.minimum.reduce(column) for column in columns))


def _joined(times: Sequence[PassTimes], order: IntArray) -> PassTimes:
    joined = dict[str, Any]()
    for field in fields(PassTimes):
        parts = [getattr(part, field.name) for part in times]
        joined[field.name] = None if parts[0] is None else np.concatenate(parts)[order]
    return PassTimes(**joined)
