"""The answer of some runs: their cases, what strategies are called there, and who ran of all that are known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

import pandas as pd

from entrain_bench.answers.case import Case, Own, SeedGroup, StrategyResult, cases_of
from entrain_bench.answers.comparison import Overall, Times, overall, place_of, with_result
from entrain_bench.answers.posterior import KEY, Chance, chances, drawn_times, job_of, split_draws, variant_of
from entrain_bench.answers.text import name_of
from entrain_bench.config.tree import choices
from entrain_bench.records.records import Record

CHOICE = "strategy="
# Labels that name a run under a draw.
NAMED = ("strategy", "workload", "model")


@dataclass(frozen=True, slots=True)
class Point:
    """A run of an answer.

    Attributes:
        name: what tells it from the others.
        gain: its speedup over the baseline's run of its job and seed, if any.
        case: what its case is called; empty where all runs do the same job.
    """

    record: Record
    name: str
    gain: float | None
    case: str = ""


class Pictures(Protocol):
    """Draws pictures of an answer, as PNG."""

    def standings(self, answer: Answer) -> bytes:
        """Iteration times of every strategy in every case."""
        ...

    def ranks(self, record: Record) -> bytes:
        """Draw what the ranks of a run hold and do, from its timeline."""
        ...

    def fidelity(self, rows: pd.DataFrame) -> bytes:
        """Predicted against measured, of the rows of one prediction."""
        ...


@dataclass(frozen=True)
class Answer:
    """Runs by case.

    Attributes:
        known: strategies that could have run, by name.
        lost: planned runs without a record, by their overrides.
        headings: of the labels that cases and groups are named by; empty for those that they do not have in common.
        draws: runs under posterior draws of the hardware constants, which are in no case.
    """

    records: Sequence[Record]
    cases: Sequence[Case]
    known: frozenset[str] = frozenset()
    lost: Sequence[str] = ()
    headings: Sequence[str] = ()
    draws: Sequence[Record] = ()

    @classmethod
    def of(cls, records: Sequence[Record], lost: Sequence[str] = ()) -> Answer:
        """The answer of some records; ``lost`` are planned runs without one."""
        usual, draws = split_draws(records)
        return cls(usual, cases_of(usual), known_strategies(records), lost, draws=draws)

    def about(self, cases: Sequence[Case], headings: Sequence[str] = ()) -> Answer:
        """The answer of some of the cases."""
        records = [record for case in cases for record in case.records]
        return replace(self, records=records, cases=cases, headings=headings)

    @property
    def baseline(self) -> str:
        """The strategy that speedups are over; empty if there is one only."""
        return self.cases[0].baseline if self.cases else ""

    @cached_property
    def results(self) -> list[StrategyResult]:
        """One for each group of every case."""
        return [result for case in self.cases for result in case.results]

    @cached_property
    def varying(self) -> list[str]:
        """Headings of the labels that not all groups have in common, or those that are given."""
        return [*self.headings] or _varying([result.group for result in self.results])

    @cached_property
    def _own(self) -> dict[str, list[str]]:
        """By strategy the headings that tell its groups apart."""
        groups: dict[str, list[SeedGroup]] = {}
        for result in self.results:
            groups.setdefault(result.group.strategy, []).append(result.group)
        return {name: [each for each in _varying(found) if each != "strategy"] for name, found in groups.items()}

    def variant(self, group: SeedGroup) -> str:
        """Return the name of a group in its case: its strategy, and options that distinguish it from others."""
        return name_of(group.own, ["strategy", *self._own[group.strategy]])

    def case_name(self, case: Case) -> str:
        """Return the name of a case; empty if all runs do the same job."""
        return name_of(case.job, self.varying)

    def points(self) -> Iterator[Point]:
        """Every run, group by group, then those under draws."""
        for case in self.cases:
            for result in case.results:
                where = self.case_name(case)
                name = " ".join(filter(None, (self.variant(result.group), where)))
                for seed, record in sorted(result.group.runs.items()):
                    yield Point(record, f"{name} seed {seed}", result.standing.gains.get(seed), where)
        for record in self.draws:
            job = name_of({each: str(text) for each, text in record.labels.items()}, [*NAMED, "seed"])
            yield Point(record, f"{job} {KEY} {record.config[KEY]}", None)

    @cached_property
    def _drawn(self) -> Mapping[str, Mapping[str, Times]]:
        """Times under draws by job and variant."""
        return drawn_times(self.draws)

    def chances(self, case: Case) -> dict[Own, Chance]:
        """P(fastest) and leads of the groups of a case, the most probable first; empty without draws."""
        firsts = {own: next(iter(group.runs.values())) for own, group in case.groups.items()}
        drawn = {own: self._drawn.get(job_of(first), {}).get(variant_of(first)) for own, first in firsts.items()}
        return chances({own: times for own, times in drawn.items() if times})

    @cached_property
    def variants(self) -> list[str]:
        """Names of groups by display order of their strategies; without one, by name at the end."""
        orders = {self.variant(result.group): result.group.display_order for result in self.results}
        return sorted(orders, key=lambda variant: place_of(variant, orders[variant]))

    def side_by_side(self, is_shown: Callable[[Record], bool]) -> dict[str, Record]:
        """A run of every variant that ``is_shown`` in the first case with such runs, at the same seed if possible."""
        for case in self.cases:
            runs = {
                self.variant(result.group): {
                    seed: result.group.runs[seed]
                    for seed in with_result(result.standing.times)
                    if is_shown(result.group.runs[seed])
                }
                for result in case.results
            }
            if done := {variant: found for variant, found in runs.items() if found}:
                shared = set.intersection(*map(set, done.values()))
                return {variant: found[min(shared or found)] for variant, found in done.items()}
        return {}

    @property
    def fastest(self) -> str:
        """The variant that is the fastest of the most cases; empty where there is nothing to compare."""
        wins = Counter(self.variant(case.groups[case.best[0]]) for case in self.cases if case.best)
        return wins.most_common(1)[0][0] if wins else ""

    @cached_property
    def overall(self) -> Mapping[str, Overall]:
        """Speedups over the cases in which the baseline has all results, by variant, the fastest first."""
        comparisons = [case.comparison for case in self.cases if case.comparison.comparable]
        variants = {own: self.variant(found) for case in self.cases for own, found in case.groups.items()}
        return {variants[own]: found for own, found in overall(comparisons).items()} if comparisons else {}

    @cached_property
    def ran(self) -> frozenset[str]:
        """Strategies with a run of any status."""
        return frozenset(result.group.strategy for result in self.results)

    @property
    def not_run(self) -> list[str]:
        """Known strategies without a run."""
        return sorted(self.known - self.ran)


def known_strategies(records: Sequence[Record]) -> frozenset[str]:
    """Strategies that could run: the suite's, those of the records' folders if these are there, and those that ran.

    A choice that ran under another name counts as that one.
    """
    folders = {record.config_dir for record in records if record.config_dir}
    own = {file.stem for folder in sorted(folders) for file in (Path(folder) / "strategy").glob("*.yaml")}
    names = {str(record.labels["strategy"]) for record in records}
    renamed = {
        text.removeprefix(CHOICE)
        for record in records
        for text in record.overrides
        if text.startswith(CHOICE) and text != f"{CHOICE}{record.labels['strategy']}"
    }
    return frozenset(names | (own | {*choices("strategy")}) - renamed)


def _varying(groups: Sequence[SeedGroup]) -> list[str]:
    """Headings of the labels that some groups do not have in common."""
    first = groups[0].labels if groups else {}
    return [heading for heading in first if any(group.labels[heading] != first[heading] for group in groups)]
