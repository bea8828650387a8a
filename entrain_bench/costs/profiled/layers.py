"""The curves of a profile's layers: seconds of a pass by tokens, attention scores and sequences of a pack.

    seconds = products(tokens) + attention(scores) + segments * segment_s

Both functions are linear between knots and never fall. ``attention`` is 0 without scores.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from entrain_bench.base.arithmetic import matmul, solve
from entrain_bench.base.arrays import BoolArray, FloatArray, IntArray
from entrain_bench.costs.profiled.file import DeviceProfile, StagePoint
from entrain_bench.specs.layer import Attention
from entrain_bench.specs.model import ModuleSpec

# The attention time of fewer scores cannot be separated from the products' time.
LEAST_SCORES = 4096.0


@dataclass(frozen=True, slots=True)
class PiecewiseLine:
    """A line that never falls: constant below the first knot, with the last slope above the last."""

    knots: FloatArray  # ascending
    values: FloatArray

    def at(self, places: FloatArray) -> FloatArray:
        """Return the values at places."""
        if len(self.knots) == 1:
            return np.asarray(self.values[0] * np.maximum(places / self.knots[0], 1.0))
        right = np.clip(np.searchsorted(self.knots, places), 1, len(self.knots) - 1)
        inside = np.maximum(places, self.knots[0])
        return np.asarray(self.values[right - 1] + self._slopes()[right - 1] * (inside - self.knots[right - 1]))

    def least_rate(self, beyond: bool) -> float:
        """Return the least ratio of value to place, from the first knot to the last, or to infinity."""
        positive = self.knots > 0
        rates = [*(self.values[positive] / self.knots[positive])]
        if beyond and len(self.knots) > 1:
            rates.append(self._slopes()[-1])
        return float(min(rates))

    def _slopes(self) -> FloatArray:
        return np.asarray(np.diff(self.values) / np.diff(self.knots))


def rises(knots: FloatArray, places: FloatArray) -> FloatArray:
    """Return functions that rise from 0 to 1 between two knots; the last keeps rising ``[places, knots - 1]``."""
    most = np.append(np.ones(max(0, len(knots) - 2)), np.inf)
    return np.clip((places[:, None] - knots[:-1]) / np.diff(knots), 0.0, most)


def knots_of_scores(tokens: FloatArray, scores: FloatArray) -> FloatArray:
    """Return the knots of attention: 0, and for each token count the most scores, if packs differ in them."""
    groups = [scores[tokens == count] for count in np.unique(tokens)]
    most = {float(group.max()) for group in groups if group.max() > group.min()}
    least = min(LEAST_SCORES, max(most, default=0.0))
    return np.array([0.0, *sorted(score for score in most if score >= least)])


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of one layer's pass, as the sum of three terms."""

    products: PiecewiseLine  # by tokens
    attention: PiecewiseLine | None = None  # by scores
    segment_s: float = 0.0  # per sequence, or per window

    def at(self, tokens: FloatArray, scores: FloatArray, segments: FloatArray) -> FloatArray:
        """Return the seconds of packs; 0 without tokens ``[packs]``."""
        seconds = self.products.at(tokens) + segments * self.segment_s
        if self.attention:
            seconds = seconds + self.attention.at(scores)
        return np.where(tokens > 0, seconds, 0.0)

    def least(self, tokens: FloatArray, scores: FloatArray, segments: FloatArray, beyond: bool) -> FloatArray:
        """Return the least seconds of any packs with these totals, each pack inside the knots unless ``beyond``."""
        seconds = tokens * self.products.least_rate(beyond) + segments * self.segment_s
        return np.asarray(seconds + (scores * self.attention.least_rate(beyond) if self.attention else 0.0))


# Passes of a layer; the last is a backward that runs the forward once more.
PASSES = ("forward_s", "backward_s", "remade_s")
MEDIAN = 1
# Module, kind of layer, tensor-parallel and context-parallel degree.
type GroupKey = tuple[str, str, int, int]


@dataclass(frozen=True, slots=True)
class LayerCurves:
    """Curves of one layer kind at one tensor-parallel and one context-parallel degree, in seconds."""

    layer: tuple[Curve, ...]  # of a layer, by ``PASSES``
    stage: tuple[Curve, ...]  # of a stage without its layers, by ``PASSES``; empty if layers are not blocks
    tokens: tuple[int, int]  # fewest and most measured tokens of a rank
    scores: float  # most measured scores of a rank


@dataclass(frozen=True, slots=True)
class _Group:
    """The measured stages of one kind of layer at one TP and CP degree, with their loads ``[stages]``."""

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
        """Whether stages differ in depth, so that the fixed time of a stage can be estimated."""
        return len({point.layers for point in self.points}) > 1

    def passes(self) -> list[str]:
        """Passes that were timed."""
        return [name for name in PASSES if getattr(self.points[0], name)]

    def seconds(self, name: str) -> list[float]:
        """Median of a pass over each stage."""
        return [getattr(point, name)[MEDIAN] for point in self.points]

    def curves(self, name: str) -> tuple[Curve, Curve]:
        """Return the curves of a layer and of a stage that together fit the measurements of a pass best."""
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
    """Return the segments that one of ``cp`` ranks attends in, by its two runs of every sequence ``[chunks]``."""
    if cp == 1:
        return segments
    if attention.window_tokens or whole_pack:
        return np.minimum(segments, segments / cp + 2.0)
    return segments * (1.0 + attention.causal)


def fit_curves(profile: DeviceProfile, modules: Sequence[ModuleSpec]) -> dict[GroupKey, LayerCurves]:
    """Return the curves of all measured layer kinds."""
    return {key: _curves(group) for key, group in _groups(profile, modules)}


def _groups(profile: DeviceProfile, modules: Sequence[ModuleSpec]) -> Iterator[tuple[GroupKey, _Group]]:
    attentions = {(module.name, layer.kind): layer.attention for module in modules for layer in module.kinds}
    groups: dict[GroupKey, list[StagePoint]] = {}
    # Sorted, because the order of measurement must not matter.
    for point in sorted(profile.stages, key=lambda point: point.key):
        groups.setdefault((point.module, point.kind, point.tp, point.cp), []).append(point)
    for key, points in groups.items():
        if key[:2] in attentions:
            loads = np.array([_load(attentions[key[:2]], point) for point in points])
            yield key, _Group(tuple(points), *loads.T)


def _load(attention: Attention | None, point: StagePoint) -> tuple[float, float, float]:
    array = np.array(point.lengths)
    cp = point.cp
    tokens = float(-(-array.sum() // cp))
    if attention is None:
        return tokens, 0.0, 0.0
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


# Share of a column's square below which it only repeats other columns.
RIDGE = 1e-9
# Slope, relative to the seconds, below which a factor stays 0.
LEAST_SLOPE = 1e-9


def fit_factors(parts: FloatArray, seconds: Sequence[float]) -> FloatArray:
    """Return the factors >= 0 ``[parts]`` that minimize squared relative residuals; ``parts`` ``[points, parts]``.

    The active-set method of Lawson and Hanson (Solving Least Squares Problems, 1974, chapter 23), in a fixed order.
    """
    relative = np.asarray(parts, np.float64) / np.asarray(seconds, np.float64)[:, None]
    scale = np.sqrt((relative * relative).sum(axis=0))
    used = np.flatnonzero(scale > 0)
    columns = relative[:, used] / scale[used]
    square = matmul(columns.T, columns) + RIDGE * np.eye(len(used))
    right = columns.sum(axis=0)
    factors = np.zeros(len(used))
    above = np.zeros(len(used), bool)
    while True:
        slope = np.where(above, -np.inf, right - matmul(square, factors))
        if above.all() or slope.max() <= LEAST_SLOPE:
            break
        above[int(np.argmax(slope))] = True
        factors = _best_above(square, right, factors, above)
    solution = np.zeros(len(scale))
    solution[used] = factors / scale[used]
    return solution


def _best_above(square: FloatArray, right: FloatArray, factors: FloatArray, above: BoolArray) -> FloatArray:
    while True:
        best = np.zeros(len(factors))
        best[above] = solve(square[np.ix_(above, above)], right[above])
        if not (best[above] <= 0).any():
            return best
        falling = np.flatnonzero(above & (best <= 0))
        steps = factors[falling] / (factors[falling] - best[falling])
        factors = factors + steps.min() * (best - factors)
        factors[falling[int(np.argmin(steps))]] = 0.0
        above &= factors > 0
