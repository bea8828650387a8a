"""Seconds of one layer's pass between measured packs: a term of tokens, one of attention scores, one of sequences.

    seconds = products(tokens) + attention(scores) + segments * segment_s

Packs of as many tokens, cut into one sequence or into many, differ in their scores, and so tell the terms apart. Both
functions are linear between knots and never fall; ``attention`` is 0 without scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from entrain_bench.base.arrays import FloatArray

# Attention over fewer scores takes no time that could be told from that of the products.
LEAST_SCORES = 4096.0


@dataclass(frozen=True, slots=True)
class Line:
    """A function that is linear between knots and never falls: below the first as there, beyond the last as before it.

    Attributes:
        knots: places, ascending ``[knots]``.
        values: at the knots ``[knots]``.
    """

    knots: FloatArray
    values: FloatArray

    def at(self, places: FloatArray) -> FloatArray:
        """Values at places."""
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


def rises(knots: FloatArray, places: FloatArray) -> FloatArray:
    """Functions that rise from 0 to 1 between a knot and the next, the last goes on ``[places, knots - 1]``.

    Sums of them, with factors >= 0, are the functions that are linear between knots and never fall.
    """
    most = np.append(np.ones(max(0, len(knots) - 2)), np.inf)[: len(knots) - 1]
    return np.clip((places[:, None] - knots[:-1]) / np.diff(knots), 0.0, most)


def knots_of_scores(tokens: FloatArray, scores: FloatArray) -> FloatArray:
    """Knots of the attention term: 0, and the most scores of packs of as many tokens, where they make a difference.

    Packs of as many tokens that all have as many scores do not tell attention from products.
    """
    groups = [scores[tokens == each] for each in np.unique(tokens)]
    most = {float(group.max()) for group in groups if group.max() > group.min()}
    least = min(LEAST_SCORES, max(most, default=0.0))
    return np.array([0.0, *sorted(each for each in most if each >= least)])


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of one layer's pass; see above.

    Attributes:
        products: by tokens.
        attention: by scores; None without.
        segment_s: of a sequence, or of a window.
    """

    products: Line
    attention: Line | None = None
    segment_s: float = 0.0

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
