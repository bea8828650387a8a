"""Candidates by their estimates: the best of every value of every knob, and what simulations of some say of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from entrain_bench.base.arithmetic import decisive, log2
from entrain_bench.base.arrays import FloatArray, IntArray

# Rounds of the fit of an error for every value of every knob, and the simulations that weigh as much as no error.
ROUNDS = 6
PRIOR = 1.0


@dataclass(frozen=True, slots=True)
class Offer[What]:
    """A candidate with its estimated time and the values of its knobs."""

    estimated_s: float
    knobs: tuple[object, ...]
    what: What


def _always(_: object) -> bool:
    return True


def by_turns[What](
    offers: Sequence[Offer[What]], runs: Callable[[Offer[What]], bool] = _always
) -> Iterator[Offer[What]]:
    """Offers that run, each once: by turns the best that is left of all and of every value of every knob.

    Values take their turns by rising best estimate; equal estimates go by index. An offer that does not run costs its
    value no turn: the best estimates of a value often are those that exceed memory.

    Args:
        offers: in any order.
        runs: whether an offer can be taken; asked once of each until the caller stops.
    """
    rising = sorted(range(len(offers)), key=lambda index: decisive(offers[index].estimated_s))
    values: dict[object, list[int]] = {}
    for index in rising:
        for value in (None, *enumerate(offers[index].knobs)):
            values.setdefault(value, []).append(index)
    waiting = [iter(indices) for indices in values.values()]
    taken: set[int] = set()
    while waiting:
        left = []
        for indices in waiting:
            for index in indices:
                if index not in taken:
                    taken.add(index)
                    if runs(offers[index]):
                        left.append(indices)
                        yield offers[index]
                        break
        waiting = left


@dataclass(frozen=True, slots=True)
class OfferEstimates:
    """Estimates of offers, corrected by simulations of some of them.

    Attributes:
        octaves: binary logarithm of the estimated seconds ``[offers]``.
        values: number of the value of each knob ``[knobs, offers]``.
    """

    octaves: FloatArray
    values: IntArray

    @classmethod
    def of(cls, offers: Sequence[Offer[object]]) -> OfferEstimates:
        """The estimates of some offers, one at least."""
        columns = []
        for knob in zip(*(offer.knobs for offer in offers), strict=True):
            numbers: dict[object, int] = {}
            columns.append([numbers.setdefault(value, len(numbers)) for value in knob])
        seconds = np.maximum([offer.estimated_s for offer in offers], 1e-12)
        return cls(log2(seconds), np.array(columns, np.int64).reshape(-1, len(offers)))

    def corrected(self, simulated: Sequence[int], seconds: Sequence[float]) -> FloatArray:
        """Estimates if each value of each knob errs by a factor of its own (ridge regression of the logarithms).

        Args:
            simulated: offers that were simulated, one at least.
            seconds: what they took.

        Returns:
            Binary logarithms of the expected seconds, to compare only ``[offers]``.
        """
        left = log2(np.array(seconds)) - self.octaves[[*simulated]]
        left -= np.median(left)
        errors = [np.zeros(1 + int(values.max())) for values in self.values]
        for _ in range(ROUNDS):
            for knob, values in enumerate(self.values):
                simulated_values = values[[*simulated]]
                left += errors[knob][simulated_values]
                count = np.bincount(simulated_values, minlength=len(errors[knob]))
                errors[knob] = np.bincount(simulated_values, left, len(errors[knob])) / (count + PRIOR)
                left -= errors[knob][simulated_values]
        expected = self.octaves.copy()
        for knob, values in enumerate(self.values):
            expected += errors[knob][values]
        return decisive(expected)
