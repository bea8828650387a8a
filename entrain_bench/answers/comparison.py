"""The one comparison: which strategy of a case is the fastest, which are as good, and which cases are not decided.

A case is a model, a workload, a cluster and all settings that no strategy owns. Its groups are the strategies, or
variants of a strategy. Every two groups are compared on all seeds that both ran (``statistics``). A group that failed
or was skipped at a seed cannot win. A group can lack seeds because it did not run there or its record was lost; if such
a group might be the fastest, the case is not decided.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from entrain_bench.answers.statistics import LEVEL, Interval, mean_interval, not_worse, ratio_interval
from entrain_bench.base.arithmetic import decisive, exp, log

# The metric that decides.
TIME = "iteration_time_s"
# Ratio to the fastest above which a strategy never ties, however few the seeds.
MARGIN = 1.05


class Verdict(StrEnum):
    """How a group does in a case.

    ``OPEN``: might be the fastest, but lacks seeds. ``BEHIND``: slower by its mean, which may be chance, because it ran
    at one seed, or is slower by more than the margin though not significantly.
    """

    FASTEST = "fastest"
    AS_GOOD = "as good"
    OPEN = "not decided"
    BEHIND = "behind"
    SLOWER = "slower"
    FAILED = "no result"


type Times = Mapping[int, float | None]


@dataclass(frozen=True, slots=True)
class Standing:
    """How a group does in a case.

    Attributes:
        times: seconds per iteration by seed; None for a run that failed or was skipped.
        gains: speedups over its reference by seed, where both have a result; ``speedup``: their geometric mean.
        behind: its times over the fastest's at shared seeds; None for the fastest and without such seeds.
    """

    times: Times
    gains: Mapping[int, float]
    time: Interval | None
    speedup: Interval | None
    behind: Interval | None
    verdict: Verdict

    @property
    def num_ok(self) -> int:
        """Runs with a result."""
        return len(with_result(self.times))


@dataclass(frozen=True, slots=True)
class Comparison[Name: Hashable]:
    """The groups of a case; ``ranked``: the fastest first, those without a result last."""

    standings: Mapping[Name, Standing]
    ranked: Sequence[Name]

    def with_verdict(self, *verdicts: Verdict) -> list[Name]:
        """The names with one of some verdicts, the fastest first."""
        return [name for name in self.ranked if self.standings[name].verdict in verdicts]

    @property
    def best(self) -> list[Name]:
        """The fastest and all that are as good, the fastest first; none if that is not decided."""
        return [] if self.with_verdict(Verdict.OPEN) else self.with_verdict(Verdict.FASTEST, Verdict.AS_GOOD)

    @property
    def seeds(self) -> list[int]:
        """The seeds of all groups."""
        return sorted({seed for standing in self.standings.values() for seed in standing.times})

    def gains_everywhere(self, name: Name) -> bool:
        """Whether a group has a speedup at all seeds of the case."""
        standing = self.standings.get(name)
        return standing is not None and len(standing.gains) == len(self.seeds)

    @property
    def comparable(self) -> bool:
        """Whether any group has a speedup at all seeds; the baseline itself has one if it lacks no result."""
        return any(map(self.gains_everywhere, self.standings))


def baseline_of(orders: Mapping[str, float | None]) -> str:
    """The strategy that others are compared with: by display order, those without one last, then by name."""

    def place(name: str) -> tuple[float, str]:
        order = orders[name]
        return math.inf if order is None else order, name

    return min(orders, key=place)


def compare[Name: Hashable](
    times: Mapping[Name, Times], references: Mapping[Name, Name], level: float | None = None
) -> Comparison[Name]:
    """Compare the groups of a case.

    Args:
        times: seconds per iteration by group and seed; None for a run that failed or was skipped.
        references: the group that another's speedup is over; a group that is not named has none.
        level: how often a group as good as the fastest may be called slower among those with the same seeds; None:
            ``LEVEL`` is divided among all sets of seeds, so it holds for the case.
    """
    done = {name: with_result(by_seed) for name, by_seed in times.items()}
    whole = [name for name, by_seed in done.items() if by_seed and len(by_seed) == len(times[name])]
    best = _fastest({name: done[name] for name in whole}) if whole else None
    verdicts = _verdicts(done, whole, best, level) if best is not None else {}
    standings = {}
    for name, by_seed in done.items():
        other = done.get(references[name], {}) if name in references else {}
        standings[name] = Standing(
            times[name],
            {seed: other[seed] / by_seed[seed] for seed in by_seed if seed in other},
            mean_interval([*by_seed.values()]) if by_seed else None,
            shared_ratio(other, by_seed),
            shared_ratio(by_seed, done[best]) if best is not None and name != best else None,
            verdicts.get(name, Verdict.FAILED),
        )

    def place(name: Name) -> tuple[bool, bool, float, float, str]:
        failed = standings[name].verdict == Verdict.FAILED
        time = standings[name].time
        ratio = _mean_ratio(done[name], done[best]) if best is not None and time else math.inf
        return failed, name != best, ratio, decisive(time.mean) if time else math.inf, str(name)

    return Comparison(standings, sorted(standings, key=place))


def with_result(times: Times) -> dict[int, float]:
    """The seeds with a result, in their order."""
    return {seed: time for seed in sorted(times) if (time := times[seed]) is not None}


def overall[Name: Hashable](comparisons: Sequence[Comparison[Name]]) -> dict[Name, Interval]:
    """Return geometric mean speedups over cases, at the seeds that all share, the fastest first.

    They are of the groups with a speedup at all seeds of all cases.
    """
    seeds = sorted(set.intersection(*({*one.seeds} for one in comparisons)))
    means = {}
    for name in comparisons[0].standings if seeds else ():
        if all(one.gains_everywhere(name) for one in comparisons):
            logs = [[log(one.standings[name].gains[seed]) for one in comparisons] for seed in seeds]
            mean = mean_interval([math.fsum(one) / len(one) for one in logs])
            means[name] = replace(mean, mean=exp(mean.mean), low=exp(mean.low), high=exp(mean.high))
    return dict(sorted(means.items(), key=lambda item: -decisive(item[1].mean)))


def _fastest[Name: Hashable](times: Mapping[Name, Mapping[int, float]]) -> Name:
    """Return the name that the fewest others are ahead of, each pair compared on the seeds that both have."""

    def losses(name: Name) -> int:
        return sum(_mean_ratio(times[other], times[name]) < 1 for other in times if other != name)

    def place(name: Name) -> tuple[int, int, float, list[float], str]:
        by_seed = times[name]
        return (
            losses(name),
            -len(by_seed),
            decisive(math.fsum(by_seed.values()) / len(by_seed)),
            [*by_seed.values()],
            str(name),
        )

    return min(times, key=place)


def _verdicts[Name: Hashable](
    done: Mapping[Name, Mapping[int, float]], whole: Sequence[Name], best: Name, level: float | None
) -> dict[Name, Verdict]:
    """Verdicts on those without a failure.

    Names that lack seeds are tested at the seeds that they share with the best, in a row with all names that have
    these. The fastest strategy decides the tested rows, so the level is divided among all strategies that may be
    fastest.
    """
    seeds = {name: frozenset(done[name]) for name in whole}
    kinds = {*seeds.values()}
    testable = {one & other for one in kinds for other in kinds if len(one & other) > 1}
    level = LEVEL / max(1, len(testable)) if level is None else level
    good: dict[frozenset[int], frozenset[Name]] = {}
    verdicts = {best: Verdict.FASTEST}
    for name in whole:
        shared = seeds[best] & seeds[name]
        if shared in testable and shared not in good:
            row = [member for member in whole if shared <= seeds[member]]
            good[shared] = not_worse({member: [done[member][seed] for seed in sorted(shared)] for member in row}, level)
        if shared in good and name not in good[shared]:
            verdict = Verdict.SLOWER
        elif _mean_ratio(done[name], done[best]) > MARGIN:
            verdict = Verdict.BEHIND
        elif seeds[name] != seeds[best]:
            verdict = Verdict.OPEN
        else:
            verdict = Verdict.AS_GOOD if len(shared) > 1 else Verdict.BEHIND
        verdicts.setdefault(name, verdict)
    return verdicts


def _mean_ratio(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    """One mean over another at the seeds that both have; 1 where they share none, which decides nothing."""
    shared = [seed for seed in one if seed in other]
    return decisive(math.fsum(one[s] for s in shared) / math.fsum(other[s] for s in shared)) if shared else 1.0


def shared_ratio(one: Mapping[int, float], other: Mapping[int, float]) -> Interval | None:
    """Return the ratios of one over another at the seeds that both have; None without such a seed."""
    shared = [seed for seed in one if seed in other]
    pairs = [one[seed] for seed in shared], [other[seed] for seed in shared]
    return ratio_interval(*pairs) if shared else None


def geometric_mean(ratios: Sequence[float]) -> float:
    """Return the geometric mean of at least one ratio."""
    return exp(math.fsum(map(log, ratios)) / len(ratios))
