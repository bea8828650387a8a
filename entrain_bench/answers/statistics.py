"""Means with confidence intervals, the strategies that cannot be excluded as the best, and rank correlations.

Runs of one seed see the same samples, so strategies are compared seed by seed (paired). A ratio over seeds is the
geometric mean of the seeds' ratios, with Student's t on their logarithms: a ratio and its inverse say the same.
Intervals hold for new seeds of the same job. They do not contain the error of the cost model.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from scipy import special

from entrain_bench.base.arithmetic import LN_2, decisive, exp, log, log2

CONFIDENCE = 0.95
# A row's error: how often at least one of the strategies that are equally the best is excluded.
LEVEL = 0.05
# Digits that are kept of Student's t: libraries differ in the last ones.
DIGITS = 9
# Relative difference below which two times are the same: rounding, not a result.
EQUAL = 1e-9
# Weight of the mean variance over all pairs in a moderated variance; simulations found the most power around 1/6.
SHARED = 1 / 6
# Part of the level that goes to tests with a pair's own variance.
ORDINARY = 1 / 5
# With fewer seeds Student's t interval is unreliable: they may miss rare long batches.
ENOUGH_SEEDS = 4
# Numbers of seeds with which simulated critical values are lower than the general formula says.
FEW_SEEDS = range(3, 6)


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over ``num_values`` seeds with its 95% confidence interval; with a single value both ends are the mean."""

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


def mean_interval(values: Sequence[float], further: float = math.inf) -> Interval:
    """Return the mean of values by seed with Student's t interval.

    Of finitely many ``further`` seeds, the interval has their mean in 95% of cases (prediction).
    """
    mean, error = _mean_and_error(values)
    number = len(values)
    half = t_quantile(number - 1) * error * math.sqrt(1 + number / further) if number > 1 else 0.0
    return Interval(mean, mean - half, mean + half, number)


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """Return the geometric mean of paired ratios of positive numbers, with the interval of their logarithms' mean."""
    logs = mean_interval(_log_ratios(numerators, denominators))
    return replace(logs, mean=exp(logs.mean), low=exp(logs.low), high=exp(logs.high))


def not_worse[Name: Hashable](times: Mapping[Name, Sequence[float]], level: float = LEVEL) -> frozenset[Name]:
    """Return the names that cannot be excluded as the best; with a single seed all of them.

    Paired t-tests of the logarithms compare all names with all. A name is excluded if it is significantly slower than
    another that remains, at ``level`` over all ordered pairs of those that remain (Bonferroni). This is repeated until
    no name is excluded: fewer pairs need less evidence. Names with the least mean always remain.

    Args:
        times: of each name, positive, the same seeds in the same order.
        level: how often at least one of the equally best names may be excluded.
    """
    if min(min(by_seed) for by_seed in times.values()) <= 0:
        raise ValueError("only positive times are compared")
    sums = {name: decisive(math.fsum(by_seed)) for name, by_seed in times.items()}
    shortest = min(sums.values())
    num_seeds = len(next(iter(times.values())))
    least = frozenset(name for name, total in sums.items() if total == shortest)
    if num_seeds == 1:
        return frozenset(times)
    logs = dict(zip(times, (LN_2 * log2([*times.values()])).tolist(), strict=True))
    pairs = {
        (one, other): _mean_and_error([a - b for a, b in zip(logs[one], logs[other], strict=True)])
        for one, other in permutations(times, 2)
    }
    while slower := _slower(pairs, num_seeds, level) - least:
        pairs = {pair: moments for pair, moments in pairs.items() if slower.isdisjoint(pair)}
    return least.union(*pairs)


def _slower[Name: Hashable](
    pairs: Mapping[tuple[Name, Name], tuple[float, float]], num_seeds: int, level: float
) -> set[Name]:
    """Return the names that are significantly slower than another.

    Among many pairs, a variance from few seeds is too small by chance for some. So most of the level goes to tests
    with moderated variances: ``1 - SHARED`` of the pair's own and ``SHARED`` of the mean over all pairs. The rest goes
    to ordinary tests, which find small differences that are the same at every seed. ``pairs`` hold mean and standard
    error of the difference of logarithms for every ordered pair.
    """
    if not pairs:
        return set()
    num_names = len({name for name, _ in pairs})
    # With two names both tests are the same one.
    ordinary = ORDINARY if num_names > 2 else 1.0
    moderated = 1 - ORDINARY if num_names > 2 else 1.0
    alone = _critical(num_seeds - 1, ordinary * level / len(pairs))
    shared = _critical(degrees_of_freedom(num_names, num_seeds), moderated * level / len(pairs))
    typical = SHARED * math.fsum(error**2 for _, error in pairs.values()) / len(pairs)
    return {
        one
        for (one, _), (mean, error) in pairs.items()
        if mean >= EQUAL and mean > min(alone * error, shared * math.sqrt((1 - SHARED) * error**2 + typical))
    }


def degrees_of_freedom(num_names: int, num_seeds: int) -> float:
    """Return the degrees of freedom of a moderated variance, in the worst of the simulated cases (docs/statistics.md).

    More names than two add up to 0.9 degrees a seed; with three to five seeds they add up to one more.
    """
    few = max(0.0, 1 - 4 / num_names) if num_seeds in FEW_SEEDS else 0.0
    return (num_seeds - 1) * (1 + 0.9 * (1 - 2 / num_names)) + few


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float:
    """Kendall's rank correlation of two lists of numbers, ties counted half (tau-b); 1 if both rank nothing.

    Infinite numbers, for runs without a result, are equal to each other and come last.
    """
    pairs = [[decisive(number) for number in numbers] for numbers in (first, second)]
    if any(len({*numbers}) == 1 for numbers in pairs):
        return float(all(len({*numbers}) == 1 for numbers in pairs))
    # Only figures need it, and importing takes a second.
    from scipy.stats import kendalltau

    return round(float(kendalltau(*pairs).statistic), DIGITS)


def t_quantile(degrees: int) -> float:
    """How many standard errors the ``CONFIDENCE`` interval reaches to either side."""
    return round(float(special.stdtrit(degrees, (1 + CONFIDENCE) / 2)), DIGITS)


def _critical(degrees: float, chance: float) -> float:
    return round(-float(special.stdtrit(degrees, chance)), DIGITS)


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    count = len(values)
    mean = math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    return mean, math.sqrt(squares / (count - 1) / count) if count > 1 else 0.0


def _log_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    if min(*numerators, *denominators) <= 0:
        raise ValueError("ratios are compared of positive numbers only")
    return [log(one / other) for one, other in zip(numerators, denominators, strict=True)]
