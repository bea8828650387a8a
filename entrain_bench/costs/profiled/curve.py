"""Interpolate the seconds of one layer's pass between measured packs, by tokens, attention scores and sequences.

    seconds = products(tokens) + attention(scores) + segments * segment_s

Packs with the same tokens in one or in many sequences have different scores, which separates the terms. Both functions
are linear between knots and never fall. ``attention`` is 0 without scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from entrain_bench.base.arrays import FloatArray

# Attention over fewer scores takes no time that could be told from that of the products.
LEAST_SCORES = 4096.0


@dataclass(frozen=True, slots=True)
class PiecewiseLine:
    """A piecewise linear function that never falls: constant below the first knot, with the last slope above the last.

    Attributes:
        knots: arguments, ascending ``[knots]``.
        values: values at the knots ``[knots]``.
    """

    knots: FloatArray
    values: FloatArray

    def at(self, places: FloatArray) -> FloatArray:
        """Return the values at places."""
        if len(self.knots) == 1:
            return np.asarray(self.values[0] * np.maximum(places / self.knots[0], 1.0))
        right = np.clip(np.searchsorted(self.knots, places), 1, len(self.knots) - 1)
        inside = np.maximum(places, self.knots[0])
        return np.asarray(self.values[right - 1] + self._slopes()[right - 1] * (inside - self.knots[right - 1]))

    def least_rate(self, beyond: bool) -> float:
        """Return the least ratio of value to place, from the first knot to the last, or to infinity.

        On a linear piece the ratio is least at one of its ends.
        """
        positive = self.knots > 0
        rates = [*(self.values[positive] / self.knots[positive])]
        if beyond and len(self.knots) > 1:
            rates.append(self._slopes()[-1])
        return float(min(rates))

    def _slopes(self) -> FloatArray:
        return np.asarray(np.diff(self.values) / np.diff(self.knots))


def rises(knots: FloatArray, places: FloatArray) -> FloatArray:
    """Return functions that rise from 0 to 1 between two knots; the last keeps rising ``[places, knots - 1]``.

    Their sums with factors >= 0 are the functions that are linear between knots and never fall.
    """
    most = np.append(np.ones(max(0, len(knots) - 2)), np.inf)[: len(knots) - 1]
    return np.clip((places[:, None] - knots[:-1]) / np.diff(knots), 0.0, most)


def knots_of_scores(tokens: FloatArray, scores: FloatArray) -> FloatArray:
    """Return the knots of the attention term: 0, and for each token count the most scores, if packs differ in them.

    Packs with equal tokens and equal scores cannot separate attention from products.
    """
    groups = [scores[tokens == count] for count in np.unique(tokens)]
    most = {float(group.max()) for group in groups if group.max() > group.min()}
    least = min(LEAST_SCORES, max(most, default=0.0))
    return np.array([0.0, *sorted(score for score in most if score >= least)])


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of one layer's pass, as the sum of three terms.

    Attributes:
        products: seconds by tokens.
        attention: seconds by scores; None without attention.
        segment_s: seconds per sequence, or per window.
    """

    products: PiecewiseLine
    attention: PiecewiseLine | None = None
    segment_s: float = 0.0

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
