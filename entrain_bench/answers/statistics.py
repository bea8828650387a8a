"""What a difference between runs is worth: means and intervals over seeds, who is as good as the best, rankings.

Runs of one seed see the same samples, so they are compared seed by seed (paired). A ratio over seeds is the geometric
mean of the seeds' ratios, with Student's t on their logarithms: which side is the numerator then makes no difference.
Intervals hold for a new seed's samples, profiled and trained on, in the same job; that the cost model errs is not in
them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from scipy import special

from entrain_bench.base.arithmetic import decisive, exp, log

CONFIDENCE = 0.95
# A row's error: how often a strategy as good as the best is declared worse, in any of the row's comparisons.
LEVEL = 0.05
# Digits that are kept of Student's t: libraries differ in the last ones.
DIGITS = 9
# Relative difference below which two times are the same: rounding, not a result.
EQUAL = 1e-9


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds with its 95% confidence interval, whose ends are the mean itself if there is one value only."""

    mean: float
    low: float
    high: float
    num_values: int

    @property
    def margin(self) -> float:
        """Half of the interval's width; not a number if there is one value only."""
        return (self.high - self.low) / 2 if self.num_values > 1 else math.nan

    def excludes(self, value: float) -> bool:
        """Whether there is an interval and a value is outside of it."""
        return self.num_values > 1 and not self.low <= value <= self.high


def mean_interval(values: Sequence[float]) -> Interval:
    """The mean of at least one value, with Student's t interval."""
    mean, error = _mean_and_error(values)
    half = t_quantile(len(values) - 1) * error if len(values) > 1 else 0.0
    return Interval(mean, mean - half, mean + half, len(values))


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """The geometric mean of paired ratios of positive numbers, with the interval of their logarithms' mean."""
    logs = mean_interval(_log_ratios(numerators, denominators))
    return replace(logs, mean=exp(logs.mean), low=exp(logs.low), high=exp(logs.high))


def ratio_chance(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """How likely paired ratios with a mean at least this far from 1, to either side, are by chance."""
    logs = _log_ratios(numerators, denominators)
    return min(1.0, 2 * min(_chance(logs), _chance([-value for value in logs])))


def not_worse[Name: Hashable](times: Mapping[Name, Sequence[float]], level: float = LEVEL) -> set[Name]:
    """The names whose times are not significantly longer than those of the name with the least mean.

    One-sided paired t-tests of the logarithms against that name, at a level for all of them together by Holm's rule.
    With a single seed nothing can be told: what is not equal to the best counts as worse.

    Args:
        times: of each name, the same seeds in the same order.
        level: how often one as good as the best may be declared worse.
    """
    # Of equal means the one with the least first seed, so that the order of the names decides nothing.
    best = min(times, key=lambda name: (decisive(math.fsum(times[name])), *times[name]))
    chances = {name: _chance(_log_ratios(times[name], times[best])) for name in times if name != best}
    names, left = {best}, len(chances)
    for name, chance in sorted(chances.items(), key=lambda item: item[1]):
        # Once one is not rejected, none with a greater chance is.
        if chance > level / left or len(names) > 1:
            names.add(name)
        left -= 1
    return names


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
