"""Which contender of a case is the fastest, and by how much: every table, page and figure that says so asks here.

A case is what is to be done: model, workload, cluster and all settings that no strategy owns, at some seeds. Its
contenders are the strategies, or one strategy several times with what it owns changed. They are compared seed by seed
(``statistics``). A seed without a result is counted and never averaged away: whoever lacks one is not among the best
and has no mean over several cases.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from entrain_bench.answers.statistics import Interval, mean_interval, not_worse, ratio_interval
from entrain_bench.base.arithmetic import decisive, exp, log

# The metric that decides.
TIME = "iteration_time_s"

type Times = Mapping[int, float | None]


@dataclass(frozen=True, slots=True)
class Standing:
    """How a contender does in a case.

    Attributes:
        times: seconds an iteration by seed; None for a run without a result.
        gains: how many times as fast as its reference, by every seed at which both have a result.
        time: mean seconds an iteration over the seeds with a result; None without any.
        speedup: geometric mean of the gains; None without any.
    """

    times: Times
    gains: Mapping[int, float]
    time: Interval | None
    speedup: Interval | None

    @property
    def num_ok(self) -> int:
        """Runs with a result."""
        return len(with_result(self.times))


@dataclass(frozen=True, slots=True)
class Comparison[Name: Hashable]:
    """The contenders of a case.

    Attributes:
        standings: how each does, in the given order.
        best: those with a result at all seeds of the case than which none is significantly faster; the fastest first.
    """

    standings: Mapping[Name, Standing]
    best: Sequence[Name]

    @property
    def seeds(self) -> list[int]:
        """The seeds of all contenders."""
        return sorted({seed for standing in self.standings.values() for seed in standing.times})

    def complete(self, name: Name) -> bool:
        """Whether a contender has a result at all seeds of the case."""
        standing = self.standings.get(name)
        return standing is not None and standing.num_ok == len(self.seeds)

    def gains_everywhere(self, name: Name) -> bool:
        """Whether a contender has a speed-up at all seeds of the case."""
        standing = self.standings.get(name)
        return standing is not None and len(standing.gains) == len(self.seeds)

    @property
    def comparable(self) -> bool:
        """Whether anybody has a speed-up at all seeds, as the baseline itself has where it lacks no result."""
        return any(map(self.gains_everywhere, self.standings))


@dataclass(frozen=True, slots=True)
class Overall:
    """A contender over several cases.

    Attributes:
        speedup: over its references, geometric mean over cases at every seed, then over seeds.
        least, greatest: speed-ups of single cases.
        num_best: cases in which none is significantly faster.
    """

    speedup: Interval
    least: float
    greatest: float
    num_best: int


def baseline_of(orders: Mapping[str, float | None]) -> str:
    """The strategy that others are compared with: the first by ``place_of``.

    Args:
        orders: display order of at least one strategy, by name.
    """
    return min(orders, key=lambda name: place_of(name, orders[name]))


def place_of(name: str, display_order: float | None) -> tuple[float, str]:
    """What strategies are sorted by: their display order, those that state none last, then by name."""
    return math.inf if display_order is None else display_order, name


def compare[Name: Hashable](times: Mapping[Name, Times], references: Mapping[Name, Name]) -> Comparison[Name]:
    """Compare the contenders of a case.

    Args:
        times: seconds an iteration by contender and seed; None for a run without a result.
        references: the contender that another's speed-up is over; who is left out has none.
    """
    standings = {
        name: _standing(own, times[references[name]] if name in references else {}) for name, own in times.items()
    }
    every = Comparison(standings, ())
    whole = {name: [*with_result(own).values()] for name, own in times.items() if every.complete(name)}
    found = not_worse(whole) if whole else None
    chosen = [name for name in whole if found and name in (found.best if found.known else found.least)]
    return Comparison(standings, sorted(chosen, key=lambda name: decisive(math.fsum(whole[name]))))


def with_result(times: Times) -> dict[int, float]:
    """The seeds with a result, in their order."""
    return {seed: time for seed in sorted(times) if (time := times[seed]) is not None}


def overall[Name: Hashable](comparisons: Sequence[Comparison[Name]]) -> dict[Name, Overall]:
    """Those that have a speed-up at all seeds of all cases, the fastest first; at the seeds that the cases share.

    Args:
        comparisons: at least one, each with the same names for the same contenders.
    """
    seeds = sorted(set.intersection(*({*each.seeds} for each in comparisons)))
    found = {}
    for name in comparisons[0].standings if seeds else ():
        if all(each.gains_everywhere(name) for each in comparisons):
            logs = [[log(each.standings[name].gains[seed]) for seed in seeds] for each in comparisons]
            found[name] = _overall(logs, sum(name in each.best for each in comparisons))
    return dict(sorted(found.items(), key=lambda item: -decisive(item[1].speedup.mean)))


def _standing(own: Times, reference: Times) -> Standing:
    done, other = with_result(own), with_result(reference)
    seeds = [seed for seed in done if seed in other]
    return Standing(
        own,
        {seed: other[seed] / done[seed] for seed in seeds},
        mean_interval([*done.values()]) if done else None,
        ratio_interval([other[seed] for seed in seeds], [done[seed] for seed in seeds]) if seeds else None,
    )


def _overall(logs: Sequence[Sequence[float]], num_best: int) -> Overall:
    """From logarithms of speed-ups by case and seed."""
    means = [exp(math.fsum(each) / len(each)) for each in logs]
    over_seeds = mean_interval([math.fsum(each) / len(each) for each in zip(*logs, strict=True)])
    speedup = Interval(exp(over_seeds.mean), exp(over_seeds.low), exp(over_seeds.high), over_seeds.num_values)
    return Overall(speedup, min(means), max(means), num_best)
