"""A sweep as MLflow shows it: what its runs are called, and what it answers (``answers.comparison``)."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from entrain_bench.answers.cases import Case, Row, cases_of
from entrain_bench.answers.comparison import Overall, overall, place_of, with_result
from entrain_bench.answers.contenders import Contender
from entrain_bench.answers.words import name_of, varying
from entrain_bench.records.records import LABELS, Record

# Overrides that say nothing about what is swept.
ASIDE = ("results_dir=", "mlflow", "retry=", "hydra")
# MLflow takes 500 characters; the page is readable with fewer.
MAX_NAME = 160
# What is named of a list of values.
MAX_NAMED = 8


@dataclass(frozen=True, slots=True)
class Point:
    """A run's place in its sweep.

    Attributes:
        record: the run.
        name: what tells it from the others of its sweep.
        gain: how many times as fast it is as the baseline's run of the same job and seed; None without such a run.
    """

    record: Record
    name: str
    gain: float | None


@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep by case.

    Attributes:
        records: at least one.
        cases: what they are compared in.
    """

    records: Sequence[Record]
    cases: Sequence[Case]

    @classmethod
    def of(cls, records: Sequence[Record]) -> Sweep:
        """The sweep of some records."""
        return cls(records, cases_of(records))

    @property
    def baseline(self) -> str:
        """The strategy that speed-ups are over; empty if there is one only."""
        return self.cases[0].baseline

    @cached_property
    def rows(self) -> list[Row]:
        """A row a contender of every case."""
        return [row for case in self.cases for row in case.rows]

    @cached_property
    def _varying(self) -> list[str]:
        return varying(self.rows)

    def variant(self, contender: Contender) -> str:
        """What a contender is called in its case: its strategy, and what else it does its own way."""
        return name_of(contender.own, ["strategy", *(each for each in self._varying if each != "strategy")])

    def case_name(self, case: Case) -> str:
        """What a case is called in the sweep; empty where all runs do the same job."""
        return name_of(case.job, self._varying)

    def points(self) -> Iterator[Point]:
        """Every run, contender by contender."""
        for case in self.cases:
            for row in case.rows:
                name = " ".join(filter(None, (self.variant(row.contender), self.case_name(case))))
                for seed, record in sorted(row.contender.runs.items()):
                    yield Point(record, f"{name} seed {seed}", row.standing.gains.get(seed))

    @cached_property
    def variants(self) -> list[str]:
        """What contenders are called, by the display order of their strategies; those without one last, by name."""
        orders = {self.variant(row.contender): row.contender.display_order for row in self.rows}
        return sorted(orders, key=lambda variant: place_of(variant, orders[variant]))

    def side_by_side(self, is_shown: Callable[[Record], bool]) -> dict[str, Record]:
        """A run of every variant that can be shown in the first case with such runs, at the same seed if there is one.

        Args:
            is_shown: whether there is more of a run than its record.
        """
        for case in self.cases:
            runs = {
                self.variant(row.contender): {
                    seed: row.contender.runs[seed]
                    for seed in with_result(row.standing.times)
                    if is_shown(row.contender.runs[seed])
                }
                for row in case.rows
            }
            done = {variant: found for variant, found in runs.items() if found}
            if done:
                shared = set.intersection(*map(set, done.values()))
                return {variant: found[min(shared or found)] for variant, found in done.items()}
        return {}

    @cached_property
    def wins(self) -> Mapping[str, int]:
        """In how many cases of several contenders a variant is the fastest, the most frequent first."""
        firsts = [case.contenders[case.best[0]] for case in self.cases if case.best]
        return dict(Counter(map(self.variant, firsts)).most_common())

    @property
    def fastest(self) -> str:
        """The variant that is the fastest of the most cases; empty where there is nothing to compare."""
        return next(iter(self.wins), "")

    @cached_property
    def overall(self) -> Mapping[str, Overall]:
        """Speed-ups over the cases in which the baseline has all results, by variant, the fastest first."""
        comparisons = [case.comparison for case in self.cases if case.comparison.comparable]
        variants = {own: self.variant(found) for case in self.cases for own, found in case.contenders.items()}
        return {variants[own]: found for own, found in overall(comparisons).items()} if comparisons else {}


def sweep_name(overrides: Sequence[str]) -> str:
    """What a sweep is called: its figure if it is just that, else its overrides; ``defaults`` without any."""
    texts = [text for text in overrides if not text.lstrip("+").startswith(ASIDE)]
    name = texts[0].removeprefix("figure=") if len(texts) == 1 else " ".join(texts)
    return shortened(name) or "defaults"


def shortened(name: str) -> str:
    """A name that is not too long for a page or a file, and is another one for another name."""
    if len(name) <= MAX_NAME:
        return name
    return f"{name[:MAX_NAME]}... {hashlib.sha256(name.encode()).hexdigest()[:8]}"


def describe_sweep(records: Sequence[Record]) -> str:
    """What a sweep is made of, in one sentence."""
    parts = []
    for name in LABELS:
        values = list(dict.fromkeys(str(record.labels[name]) for record in records))
        plural = {"strategy": "strategies", "harness": "harnesses"}.get(name, f"{name}s")
        parts.append(f"{name} {values[0]}" if len(values) == 1 else f"{len(values)} {plural} ({_listed(values)})")
    states = Counter(record.status for record in records)
    return f"{', '.join(parts)}: " + ", ".join(f"{count} runs {status}" for status, count in sorted(states.items()))


def _listed(values: Sequence[str]) -> str:
    more = len(values) - MAX_NAMED
    return ", ".join(values[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
