"""Curves of a profile's layers, made of the stages that were timed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from entrain_bench.arrays import FloatArray, IntArray
from entrain_bench.costs.profiled.curve import Curve, Load, fit_curve
from entrain_bench.costs.profiled.points import DeviceProfile, StagePoint
from entrain_bench.specs.layer import Attention
from entrain_bench.specs.model import ModuleSpec

# Passes of a layer; the last is a backward that runs the forward once more.
PASSES = ("forward_s", "backward_s", "remade_s")
MEDIAN = 1


@dataclass(frozen=True, slots=True)
class LayerCurves:
    """Seconds of one kind of layer at one tensor-parallel degree.

    Attributes:
        layer: of a layer, by ``PASSES``.
        stage: what a stage takes beside its layers, by ``PASSES``; none for layers that are no blocks.
        tokens: fewest and most that were measured.
        scores: most scores that were measured.
        kept_bytes_per_token: what a layer keeps from forward to backward, at most tokens.
    """

    layer: tuple[Curve, ...]
    stage: tuple[Curve, ...]
    tokens: tuple[int, int]
    scores: float
    kept_bytes_per_token: float


@dataclass(frozen=True, slots=True)
class Residual:
    """A measured pack beside what the curve says of it, seconds of one layer."""

    module: str
    kind: str
    tp: int
    name: str
    lengths: tuple[int, ...]
    measured_s: float
    curve_s: float

    @property
    def relative(self) -> float:
        """Error of the curve over what was measured."""
        return self.curve_s / self.measured_s - 1.0


@dataclass(frozen=True, slots=True)
class _Pack:
    """Stages of one kind on one pack: the shortest that was timed, and the longest."""

    few: StagePoint
    many: StagePoint

    def layer_s(self, name: str) -> float:
        """Median seconds of a layer: what each further one adds, unless noise swallows it."""
        few, many = getattr(self.few, name)[MEDIAN], getattr(self.many, name)[MEDIAN]
        added = (many - few) / max(1, self.many.layers - self.few.layers)
        return float(added if added > 0 else many / self.many.layers)

    def stage_s(self, name: str) -> float:
        """Median seconds of a stage beside its layers."""
        return float(max(0.0, getattr(self.few, name)[MEDIAN] - self.few.layers * self.layer_s(name)))

    @property
    def kept_bytes(self) -> float:
        """What a layer keeps for its backward."""
        if self.few is self.many:
            return self.many.kept_bytes / self.many.layers
        return (self.many.kept_bytes - self.few.kept_bytes) / (self.many.layers - self.few.layers)


def score_elements(attention: Attention, lengths: IntArray) -> FloatArray:
    """Score-matrix elements of each sequence ``[sequences]``, without those that a causal mask leaves out."""
    return np.asarray(attention.flops(lengths) / (4.0 * attention.query_width))


def num_segments(attention: Attention, lengths: IntArray) -> FloatArray:
    """Sequences, or windows, that each sequence attends in ``[sequences]``."""
    window = attention.window_tokens
    return np.asarray(-(-np.asarray(lengths) // window) if window else np.ones(len(lengths)), np.float64)


def load_of(attention: Attention | None, lengths: Sequence[int]) -> Load:
    """What a pass over a pack depends on."""
    array = np.array(lengths)
    if attention is None:
        return Load(float(array.sum()))
    scores, segments = score_elements(attention, array), num_segments(attention, array)
    return Load(float(array.sum()), float(scores.sum()), float(segments.sum()))


def curves_of(profile: DeviceProfile, modules: Sequence[ModuleSpec]) -> dict[tuple[str, str, int], LayerCurves]:
    """Curves by module, kind and tensor-parallel degree of all kinds that were measured."""
    return {key: _curves(packs, attention) for key, attention, packs in _measured(profile, modules)}


def residuals(profile: DeviceProfile, modules: Sequence[ModuleSpec]) -> Iterator[Residual]:
    """Every measured pack of every pass beside its curve."""
    for (module, kind, tp), attention, packs in _measured(profile, modules):
        curves = _curves(packs, attention)
        for name, curve in zip(PASSES, curves.layer, strict=False):
            for pack in packs:
                load = load_of(attention, pack.many.lengths)
                seconds = curve.at(*(np.array([each]) for each in (load.tokens, load.scores, load.segments)))
                yield Residual(module, kind, tp, name, pack.many.lengths, pack.layer_s(name), float(seconds[0]))


def _measured(
    profile: DeviceProfile, modules: Sequence[ModuleSpec]
) -> Iterator[tuple[tuple[str, str, int], Attention | None, list[_Pack]]]:
    attentions = {(module.name, layer.kind): layer.attention for module in modules for layer in module.kinds}
    groups: dict[tuple[str, str, int], dict[tuple[int, ...], list[StagePoint]]] = {}
    for point in profile.stages:
        group = groups.setdefault((point.module, point.kind, point.tp), {})
        group.setdefault(point.lengths, []).append(point)
    for key, group in groups.items():
        if key[:2] in attentions:
            ordered = [sorted(points, key=lambda point: point.layers) for points in group.values()]
            yield key, attentions[key[:2]], [_Pack(points[0], points[-1]) for points in ordered]


def _curves(packs: Sequence[_Pack], attention: Attention | None) -> LayerCurves:
    loads = [load_of(attention, pack.many.lengths) for pack in packs]
    names = [name for name in PASSES if getattr(packs[0].many, name)]
    passes = [fit_curve(loads, [pack.layer_s(name) for pack in packs]) for name in names]
    stage = []
    if attention:
        tokens = [Load(load.tokens) for load in loads]
        stage = [fit_curve(tokens, [pack.stage_s(name) for pack in packs]) for name in names]
    largest = max(packs, key=lambda pack: sum(pack.many.lengths))
    return LayerCurves(
        tuple(passes),
        tuple(stage),
        (int(min(load.tokens for load in loads)), int(max(load.tokens for load in loads))),
        max(load.scores for load in loads),
        largest.kept_bytes / sum(largest.many.lengths),
    )
