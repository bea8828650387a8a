"""Means with confidence intervals, the strategies that cannot be excluded as the best, and rank correlations.

Runs of one seed see the same samples, so strategies are compared seed by seed (paired). A ratio over seeds is the
geometric mean of the seeds' ratios, with Student's t on their logarithms: a ratio and its inverse say the same.
Intervals hold for new seeds of the same job. They do not contain the error of the cost model.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import permutations

from scipy import special

from entrain_bench.base.arithmetic import decisive, exp, log

CONFIDENCE = 0.95
# A row's error: how often at least one of the strategies that are equally the best is excluded.
LEVEL = 0.05
# Digits that are kept of Student's t: libraries differ in the last ones.
DIGITS = 9
# Relative difference below which two times are the same: rounding, not a result.
EQUAL = 1e-9
# Fewer batches than these contain no batch of a kind that is one in ten with a chance of more than 10%: 0.9^22 = 0.098.
ENOUGH_BATCHES = 22
# An interval is doubtful if one end of the values is so many times as far from the median as the other end ...
LOPSIDED = 6.0
# ... and if there are enough values to say so: of eight normal values, 0.7% are that lopsided.
ENOUGH_VALUES = 8


class Doubt(StrEnum):
    """Why an interval may hold less often than its 95%: the sentence to print."""

    LONG_BATCHES = "95% interval not reliable: a few batches are much longer or shorter than the others"
    FEW_BATCHES = f"95% interval not reliable: fewer than {ENOUGH_BATCHES} batches can miss rare long ones"


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds with its 95% confidence interval; with a single value both ends are the mean.

    Attributes:
        mean: over seeds.
        low: lower end.
        high: upper end.
        num_values: seeds.
        doubt: why the interval is not to be trusted; None if nothing speaks against it.
    """

    mean: float
    low: float
    high: float
    num_values: int
    doubt: Doubt | None = None

    @property
    def trusted(self) -> bool:
        """Whether nothing speaks against the interval."""
        return self.doubt is None

    @property
    def margin(self) -> float:
        """Half of the interval's width; not a number if there is one value only."""
        return (self.high - self.low) / 2 if self.num_values > 1 else math.nan

    def excludes(self, value: float) -> bool:
        """Whether there is an interval and a value is outside of it."""
        return self.num_values > 1 and not self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Best[Name: Hashable]:
    """Which strategies of a row may be the best.

    Attributes:
        least: those with the least mean: one, or several with the same mean.
        best: those that cannot be excluded as the best; all of them if nothing is known.
        known: whether there are several seeds, without which no strategy can be excluded.
    """

    least: frozenset[Name]
    best: frozenset[Name]
    known: bool


def mean_interval(values: Sequence[float], num_batches: int = 1) -> Interval:
    """Return the mean of at least one value, with Student's t interval.

    Args:
        values: one for each seed.
        num_batches: batches that each value is the mean of.
    """
    mean, error = _mean_and_error(values)
    half = t_quantile(len(values) - 1) * error if len(values) > 1 else 0.0
    return Interval(mean, mean - half, mean + half, len(values), doubt_of(values, num_batches))


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float], num_batches: int = 1) -> Interval:
    """Return the geometric mean of paired ratios of positive numbers, with the interval of their logarithms' mean.

    Args:
        numerators: one for each seed.
        denominators: at the same seeds.
        num_batches: batches that each value is the mean of.
    """
    logs = mean_interval(_log_ratios(numerators, denominators), num_batches)
    return replace(logs, mean=exp(logs.mean), low=exp(logs.low), high=exp(logs.high))


def doubt_of(values: Sequence[float], num_batches: int = 1) -> Doubt | None:
    """Return why Student's t interval of some values is not to be trusted, if so.

    Args:
        values: one for each seed.
        num_batches: batches that each value is the mean of.
    """
    ordered = sorted(values)
    middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    near, far = sorted((middle - ordered[0], ordered[-1] - middle))
    lopsided = far > EQUAL * max(1.0, abs(middle)) and decisive(far) > decisive(LOPSIDED * near)
    if lopsided and len(ordered) >= ENOUGH_VALUES:
        return Doubt.LONG_BATCHES
    return Doubt.FEW_BATCHES if len(ordered) > 1 and len(ordered) * num_batches < ENOUGH_BATCHES else None


def ratio_chance(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """How likely paired ratios with a mean at least this far from 1, to either side, are by chance."""
    logs = _log_ratios(numerators, denominators)
    return min(1.0, 2 * min(_chance(logs), _chance([-value for value in logs])))


def not_worse[Name: Hashable](times: Mapping[Name, Sequence[float]], level: float = LEVEL) -> Best[Name]:
    """Return the names that cannot be excluded as the best.

    All are compared with all by one-sided paired t-tests of the logarithms. A name is excluded if it is significantly
    slower than any other that remains, at ``level`` over all ordered pairs of those that remain (Bonferroni). This is
    repeated until no name is excluded: fewer pairs need less evidence. Names with the least mean always remain.

    Args:
        times: of each name, the same seeds in the same order.
        level: how often at least one of the equally best names may be excluded.
    """
    sums = {name: decisive(math.fsum(own)) for name, own in times.items()}
    least = frozenset(name for name, total in sums.items() if total == min(sums.values()))
    if len(next(iter(times.values()))) == 1:
        return Best(least, frozenset(times), known=False)
    chances = {(one, other): _chance(_log_ratios(times[one], times[other])) for one, other in permutations(times, 2)}
    left, before = frozenset(times), None
    while left != before:
        before = left
        limit = level / max(1, len(left) * (len(left) - 1))
        left = least | {one for one in left if all(chances[one, other] > limit for other in left - {one})}
    return Best(least, left, known=True)


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float:
    """Kendall's rank correlation of two lists of numbers, ties counted half (tau-b); 1 if both rank nothing.

    Infinite numbers, for what has no result, are equal to each other and come last.
    """
    signs = [(_sign(first[i], first[j]), _sign(second[i], second[j])) for i in range(len(first)) for j in range(i)]
    ranked = math.prod(sum(abs(pair[side]) for pair in signs) for side in range(2))
    if not ranked:
        return float(all(one == other for one, other in signs))
    return sum(one * other for one, other in signs) / math.sqrt(ranked)


def t_quantile(degrees: int) -> float:
    """How many standard errors the ``CONFIDENCE`` interval reaches to either side."""
    return round(float(special.stdtrit(degrees, (1 + CONFIDENCE) / 2)), DIGITS)


def _chance(values: Sequence[float]) -> float:
    """How likely a mean at least this far above 0 is by chance."""
    mean, error = _mean_and_error(values)
    if abs(mean) < EQUAL or not error:
        return float(mean < EQUAL)
    return round(float(special.stdtr(len(values) - 1, -mean / error)), DIGITS)


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error; 0 for a single value."""
    count, mean = len(values), math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    return mean, math.sqrt(squares / (count - 1) / count) if count > 1 else 0.0


def _log_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    if min(*numerators, *denominators) <= 0:
        raise ValueError("ratios are compared of positive numbers only")
    return [log(one / other) for one, other in zip(numerators, denominators, strict=True)]


def _sign(one: float, other: float) -> int:
    """1, 0 or -1 as one number is greater than, equal to or less than another."""
    a, b = decisive(one), decisive(other)
    return (a > b) - (a < b)
