"""Fit the curves of a profile's layers to the measured stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.costs.profiled.curve import Curve, PiecewiseLine, knots_of_scores, rises
from entrain_bench.costs.profiled.fitting import fit_factors
from entrain_bench.costs.profiled.timed_points import DeviceProfile, StagePoint
from entrain_bench.specs.layer import Attention
from entrain_bench.specs.model import ModuleSpec

# Passes of a layer; the last is a backward that runs the forward once more.
PASSES = ("forward_s", "backward_s", "remade_s")
MEDIAN = 1
# Module, kind of layer, tensor-parallel and context-parallel degree.
type GroupKey = tuple[str, str, int, int]


@dataclass(frozen=True, slots=True)
class LayerCurves:
    """Curves of one layer kind at one tensor-parallel and one context-parallel degree, in seconds.

    Attributes:
        layer: curve of a layer, by ``PASSES``.
        stage: curve of a stage without its layers, by ``PASSES``; 0 for layers that are not blocks.
        tokens: fewest and most measured tokens of a rank.
        scores: most measured scores of a rank.
    """

    layer: tuple[Curve, ...]
    stage: tuple[Curve, ...]
    tokens: tuple[int, int]
    scores: float


@dataclass(frozen=True, slots=True)
class Residual:
    """Measured and fitted seconds of a pass over a stage."""

    point: StagePoint
    name: str
    measured_s: float
    curve_s: float

    @property
    def relative(self) -> float:
        """Error of the fit, relative to the measurement."""
        return self.curve_s / self.measured_s - 1.0


@dataclass(frozen=True, slots=True)
class _Group:
    """The stages of one kind of layer at one TP and CP degree, and what each depends on ``[stages]``."""

    points: tuple[StagePoint, ...]
    tokens: FloatArray
    scores: FloatArray
    segments: FloatArray

    @property
    def depth(self) -> FloatArray:
        """Layers of each stage."""
        return np.array([point.layers for point in self.points], np.float64)

    @property
    def is_stacked(self) -> bool:
        """Whether stages differ in their layers, so that what the stage adds can be told."""
        return len({point.layers for point in self.points}) > 1

    def passes(self) -> list[str]:
        """Passes that were timed."""
        return [name for name in PASSES if getattr(self.points[0], name)]

    def seconds(self, name: str) -> list[float]:
        """Median of a pass over each stage."""
        return [getattr(point, name)[MEDIAN] for point in self.points]

    def curves(self, name: str) -> tuple[Curve, Curve]:
        """A layer's curve, and the stage's, which together come closest to what was measured of a pass."""
        places = np.unique(self.tokens)
        marks = knots_of_scores(self.tokens, self.scores)
        once = np.column_stack([np.ones(len(self.points)), rises(places, self.tokens)])
        parts = np.column_stack([once, rises(marks, self.scores), self.segments]) * self.depth[:, None]
        if self.is_stacked:
            parts = np.column_stack([parts, once])
        factors = fit_factors(parts, self.seconds(name))
        ends = np.cumsum([len(places), len(marks) - 1, 1])
        products, attention, (segment_s,), stage = np.split(factors, ends)
        attending = PiecewiseLine(marks, np.append(0.0, np.cumsum(attention))) if len(marks) > 1 else None
        beside = np.cumsum(stage) if self.is_stacked else np.zeros(len(places))
        return Curve(PiecewiseLine(places, np.cumsum(products)), attending, float(segment_s)), Curve(
            PiecewiseLine(places, beside)
        )


def score_elements(attention: Attention, lengths: IntArray) -> FloatArray:
    """Return the elements of each sequence's score matrix that its mask keeps ``[sequences]``."""
    return np.asarray(attention.flops(lengths) / (4.0 * attention.query_width))


def num_segments(attention: Attention, lengths: IntArray) -> FloatArray:
    """Return the number of attention windows of each sequence, 1 without windows ``[sequences]``."""
    window = attention.window_tokens
    return np.asarray(-(-np.asarray(lengths) // window) if window else np.ones(len(lengths)), np.float64)


def held_segments(attention: Attention, segments: FloatArray, cp: int, whole_pack: bool) -> FloatArray:
    """Return the segments of each chunk that one of ``cp`` ranks attends in ``[chunks]``.

    It has two runs of every sequence, which are two segments under a causal mask. Of windows, and of a pack that is cut
    as a whole, it has its share, and those that are cut at the ends of its two runs.
    """
    if cp == 1:
        return segments
    if attention.window_tokens or whole_pack:
        return np.minimum(segments, segments / cp + 2.0)
    return segments * (1.0 + attention.causal)


def fit_curves(profile: DeviceProfile, modules: Sequence[ModuleSpec]) -> dict[GroupKey, LayerCurves]:
    """Return the curves of all measured layer kinds."""
    return {key: _curves(group) for key, group in _groups(profile, modules)}


def residuals(profile: DeviceProfile, modules: Sequence[ModuleSpec]) -> Iterator[Residual]:
    """Return every measured pass with its fitted seconds."""
    for _, group in _groups(profile, modules):
        for name in group.passes():
            layer, stage = group.curves(name)
            carried = group.tokens, group.scores, group.segments
            seconds = layer.at(*carried) * group.depth + stage.at(*carried)
            for point, measured, curve in zip(group.points, group.seconds(name), seconds, strict=True):
                yield Residual(point, name, measured, float(curve))


def _groups(profile: DeviceProfile, modules: Sequence[ModuleSpec]) -> Iterator[tuple[GroupKey, _Group]]:
    attentions = {(module.name, layer.kind): layer.attention for module in modules for layer in module.kinds}
    groups: dict[GroupKey, list[StagePoint]] = {}
    # In one order, whatever the order in which they were measured.
    for point in sorted(profile.stages, key=lambda point: point.key):
        groups.setdefault((point.module, point.kind, point.tp, point.cp), []).append(point)
    for key, points in groups.items():
        if key[:2] in attentions:
            loads = np.array([_load(attentions[key[:2]], point) for point in points])
            yield key, _Group(tuple(points), *loads.T)


def _load(attention: Attention | None, point: StagePoint) -> tuple[float, float, float]:
    """Tokens, scores and segments of a rank's part of a pack."""
    array = np.array(point.lengths)
    cp = point.cp
    tokens = float(-(-array.sum() // cp))
    if attention is None:
        return tokens, float(point.labelled), 0.0
    segments = held_segments(attention, num_segments(attention, array).sum(keepdims=True), cp, whole_pack=False)
    return tokens, float(score_elements(attention, array).sum() / cp), float(segments[0])


def _curves(group: _Group) -> LayerCurves:
    pairs = [group.curves(name) for name in group.passes()]
    return LayerCurves(
        tuple(layer for layer, _ in pairs),
        tuple(stage for _, stage in pairs) if group.is_stacked else (),
        (int(group.tokens.min()), int(group.tokens.max())),
        float(group.scores.max()),
    )
