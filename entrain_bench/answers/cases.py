"""The cases of some records: which runs do the same job, and who is compared with whom there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from entrain_bench.answers.comparison import Comparison, Standing, baseline_of, compare
from entrain_bench.answers.contenders import Contender, contenders_of
from entrain_bench.base.arithmetic import decisive
from entrain_bench.records.records import Record

# The texts of all that tells a contender from the others of its case.
type Own = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """Runs that do the same job.

    Attributes:
        job: labels of what is to be done, by heading.
        contenders: the fastest first; those without a result come last.
        comparison: how they do, by the same names.
        baseline: the strategy that speed-ups are over, of all cases of the same records; empty where there is one only.
    """

    job: Mapping[str, str]
    contenders: Mapping[Own, Contender]
    comparison: Comparison[Own]
    baseline: str

    @property
    def best(self) -> Sequence[Own]:
        """Those than which none is significantly faster, the fastest first; none where there is nothing to compare."""
        return self.comparison.best if len(self.contenders) > 1 else ()

    @property
    def rows(self) -> list[Row]:
        """A row a contender."""
        standings = self.comparison.standings
        return [Row(contender, standings[own], own in self.best) for own, contender in self.contenders.items()]


@dataclass(frozen=True, slots=True)
class Row:
    """A contender and how it does; ``best`` is whether none is significantly faster, of at least two."""

    contender: Contender
    standing: Standing
    best: bool


def cases_of(records: Sequence[Record]) -> list[Case]:
    """The cases of at least one record, by workload and model, then in order of appearance.

    The baseline is the first strategy of all records (``baseline_of``). Speed-ups are over its contender with the same
    parameters, or else over its only one.
    """
    contenders = contenders_of(records)
    orders = {contender.strategy: contender.display_order for contender in contenders}
    baseline = baseline_of(orders) if len(orders) > 1 else ""
    jobs: dict[Own, list[Contender]] = {}
    for contender in contenders:
        jobs.setdefault(tuple(contender.job.values()), []).append(contender)
    ordered = sorted(jobs.values(), key=lambda job: (job[0].job["workload"], job[0].job["model"]))
    return [_case(job, baseline) for job in ordered]


def _case(contenders: Sequence[Contender], baseline: str) -> Case:
    named = {tuple(contender.own.values()): contender for contender in contenders}
    times = {own: contender.times for own, contender in named.items()}
    comparison = compare(times, _references(named, baseline))

    def mean_s(own: Own) -> float:
        time = comparison.standings[own].time
        return decisive(time.mean) if time else math.inf

    return Case(contenders[0].job, {own: named[own] for own in sorted(named, key=mean_s)}, comparison, baseline)


def _references(named: Mapping[Own, Contender], baseline: str) -> dict[Own, Own]:
    """The contender of the baseline that each speed-up is over."""
    bases = [own for own, contender in named.items() if contender.strategy == baseline]
    found = {}
    for own, contender in named.items():
        same = tuple({**contender.own, "strategy": baseline}.values())
        if same in bases or len(bases) == 1:
            found[own] = same if same in bases else bases[0]
    return found
