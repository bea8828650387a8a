"""Seconds of one layer's pass between measured packs: a term of tokens, one of attention scores, one of sequences.

    seconds = products(tokens) + attention(scores) + sequences * segment_s

Packs of as many tokens, cut into one sequence or into many, differ in their scores, and so tell the terms apart. Both
functions are linear between knots and never fall; ``attention`` is 0 without scores. Plain arithmetic in one order:
the same file has the same curve on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from entrain_bench.arrays import FloatArray


@dataclass(frozen=True, slots=True)
class Load:
    """What a pass over a pack depends on.

    Attributes:
        tokens: packed tokens.
        scores: elements of the score matrices, without what causal masks leave out.
        segments: sequences, or windows of sequences, that attend to themselves.
    """

    tokens: float
    scores: float = 0.0
    segments: float = 0.0


@dataclass(frozen=True, slots=True)
class Line:
    """A function that is linear between knots, never falls, and goes on with its last slope ``[knots]``."""

    knots: FloatArray
    values: FloatArray

    def at(self, places: FloatArray) -> FloatArray:
        """Values at places; below the first knot as there."""
        if len(self.knots) == 1:
            return np.asarray(self.values[0] * np.maximum(places / self.knots[0], 1.0))
        right = np.clip(np.searchsorted(self.knots, places), 1, len(self.knots) - 1)
        inside = np.maximum(places, self.knots[0])
        return np.asarray(self.values[right - 1] + self._slopes()[right - 1] * (inside - self.knots[right - 1]))

    def least_rate(self, beyond: bool) -> float:
        """Least value per unit of place from the first knot to the last, or to infinity.

        A linear piece is lowest against its place at one of its ends.
        """
        positive = self.knots > 0
        rates = [*(self.values[positive] / self.knots[positive])]
        if beyond and len(self.knots) > 1:
            rates.append(self._slopes()[-1])
        return float(min(rates))

    def _slopes(self) -> FloatArray:
        return np.asarray(np.diff(self.values) / np.diff(self.knots))


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of one layer's pass; see above."""

    products: Line
    attention: Line | None
    segment_s: float

    def at(self, tokens: FloatArray, scores: FloatArray, segments: FloatArray) -> FloatArray:
        """Seconds of packs; 0 without tokens ``[packs]``."""
        seconds = self.products.at(tokens) + segments * self.segment_s
        if self.attention:
            seconds = seconds + self.attention.at(scores)
        return np.where(tokens > 0, seconds, 0.0)

    def least(self, tokens: FloatArray, scores: FloatArray, segments: FloatArray, beyond: bool) -> FloatArray:
        """Seconds that packs take at least which carry this together, each inside the knots or also beyond them."""
        seconds = tokens * self.products.least_rate(beyond) + segments * self.segment_s
        return np.asarray(seconds + (scores * self.attention.least_rate(beyond) if self.attention else 0.0))


def fit_curve(loads: Sequence[Load], seconds: Sequence[float]) -> Curve:
    """The curve through measured packs.

    At each number of tokens the packs with the most and the fewest scores give both functions; the packs between them
    give ``segment_s``, by least squares of relative residuals.

    Args:
        loads: of the packs.
        seconds: of one layer's pass over each.
    """
    groups = _groups(loads, seconds)
    if not any(load.scores for load in loads):
        return _curve(groups, 0.0)
    # Residuals change linearly with the seconds of a segment, but for repairs of what falls.
    unit = min(seconds)
    without, with_unit = _residuals(groups, 0.0), _residuals(groups, unit)
    change = [b - a for a, b in zip(without, with_unit, strict=True)]
    square = sum(each * each for each in change)
    product = sum(a * each for a, each in zip(without, change, strict=True))
    return _curve(groups, max(0.0, -product / square * unit) if square > 0 else 0.0)


type _Group = list[tuple[Load, float]]


def _groups(loads: Sequence[Load], seconds: Sequence[float]) -> list[_Group]:
    """Packs by tokens, each group from the fewest scores to the most."""
    groups: dict[float, _Group] = {}
    for load, each in sorted(zip(loads, seconds, strict=True), key=lambda pair: (pair[0].tokens, pair[0].scores)):
        groups.setdefault(load.tokens, []).append((load, each))
    return [*groups.values()]


def _residuals(groups: Sequence[_Group], segment_s: float) -> list[float]:
    """Relative residuals of the packs that are neither the first nor the last of their group."""
    attention, found = _attention(groups, segment_s), []
    for group in groups:
        ends = [each - _rest(load, attention, segment_s) for load, each in (group[0], group[-1])]
        products = sum(ends) / len(ends)
        found += [(products + _rest(load, attention, segment_s) - each) / each for load, each in group[1:-1]]
    return found


def _curve(groups: Sequence[_Group], segment_s: float) -> Curve:
    attention = _attention(groups, segment_s)
    products = []
    for group in groups:
        rests = [each - _rest(load, attention, segment_s) for load, each in group]
        products.append(sum(rests) / len(rests))
    tokens = [group[0][0].tokens for group in groups]
    return Curve(Line(np.array(tokens), np.array(pooled(products))), attention, segment_s)


def _attention(groups: Sequence[_Group], segment_s: float) -> Line | None:
    """Seconds by scores, from the difference between most and fewest at equal tokens; None without any scores.

    The fewest scores of a group lie below its most, and mostly below the most of the group before, where the line is
    known already.
    """
    knots, values = [0.0], [0.0]
    for group in groups:
        (few, short), (many, long) = group[0], group[-1]
        if many.scores <= max(few.scores, knots[-1]):
            continue
        difference = long - short + segment_s * (few.segments - many.segments)
        if few.scores <= knots[-1]:
            known = Line(np.array(knots), np.array(values)).at(np.array([few.scores]))[0] if few.scores else 0.0
            values.append(difference + float(known))
        else:
            share = (few.scores - knots[-1]) / (many.scores - knots[-1])
            values.append(values[-1] + difference / (1 - share))
        knots.append(many.scores)
    if not knots[1:]:
        return None
    return Line(np.array(knots), np.array([0.0, *pooled(values[1:])]))


def _rest(load: Load, attention: Line | None, segment_s: float) -> float:
    """Seconds that are not of the products."""
    attending = float(attention.at(np.array([load.scores]))[0]) if attention else 0.0
    return attending + load.segments * segment_s


def pooled(values: Sequence[float]) -> list[float]:
    """The nearest values that are nowhere negative and never fall (pool adjacent violators)."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        mean, size = value, 1
        while blocks and blocks[-1][0] >= mean:
            before, length = blocks.pop()
            mean = (before * length + mean * size) / (length + size)
            size += length
        blocks.append((mean, size))
    return [max(0.0, mean) for mean, size in blocks for _ in range(size)]
