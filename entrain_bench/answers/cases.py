"""Runs by job (cases) and by configuration (results of strategies), compared."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from entrain_bench.answers.comparison import TIME, Comparison, Standing, Verdict, baseline_of, compare
from entrain_bench.answers.statistics import Interval
from entrain_bench.records.keys import COSMETIC_KEYS
from entrain_bench.records.leaves import flatten
from entrain_bench.records.records import LABELS, Record
from entrain_bench.records.time_shares import EXPERT_SHARES, TIME_SHARES

NAMES = tuple(name for name in LABELS if name != "seed")
# Last words of paths that name a choice: the class of a part, the name of a device.
IDENTITIES = ("_target_", "name")
# Keys that a strategy owns: runs that differ in these alone do the same job.
OWNED = ("strategy",)
# Keys that the user sets for all strategies; of a single strategy, its variants.
ASKED = ("layout", "microbatch_size")
# Parts of the saved time that a reason names, and the least share of it that is worth naming.
MAX_PARTS = 2
LEAST_SHARE = 0.1
# The value of a key that a configuration does not have.
ABSENT = ()


@dataclass(frozen=True, slots=True)
class SeedGroup:
    """All runs of one configuration, by seed.

    ``name`` is the strategy, and its options in which its groups differ; unique in a case. ``labels`` has the text of
    every label, by its heading; those in ``job`` define the job.
    """

    name: str
    labels: Mapping[str, str]
    job: Mapping[str, str]
    runs: Mapping[int, Record]

    @property
    def options(self) -> dict[str, str]:
        """The labels that do not define the job: strategy and its options."""
        return {heading: text for heading, text in self.labels.items() if heading not in self.job}

    @property
    def first(self) -> Record:
        """The run of the first seed that was given."""
        return next(iter(self.runs.values()))

    @property
    def strategy(self) -> str:
        """The strategy's name."""
        return self.labels["strategy"]

    @property
    def display_order(self) -> float | None:
        """The strategy's place in figures; None if it states none."""
        order = self.first.config["strategy"].get("display_order")
        return None if order is None else float(order)

    @property
    def family(self) -> str:
        """The family that the strategy states; empty if it states none."""
        return str(self.first.config["strategy"].get("family") or "")

    @property
    def plainness(self) -> tuple[int, int, tuple[str, ...]]:
        """Sort key for the variants of a strategy: most seeds first, then fewest overrides, then labels."""
        num_overrides = min(len(record.overrides) for record in self.runs.values())
        return -len(self.runs), num_overrides, tuple(self.options.values())

    @property
    def times(self) -> dict[int, float | None]:
        """Seconds per iteration by seed; None for a run without a result."""
        done = self.values(TIME)
        return {seed: done.get(seed) for seed in sorted(self.runs)}

    def values(self, metric: str) -> dict[int, float]:
        """A metric of the runs that succeeded and measured it, by seed."""
        done = {seed: record.metrics for seed, record in sorted(self.runs.items()) if record.status == "ok"}
        return {seed: metrics[metric] for seed, metrics in done.items() if metrics.get(metric) is not None}

    @property
    def seconds_by_class(self) -> dict[str, float]:
        """Mean seconds of an iteration over seeds, by class of ``TIME_SHARES``; empty if they are not measured."""
        times = self.values(TIME)
        shares = {name: self.values(name) for name in (*TIME_SHARES, *EXPERT_SHARES)}
        shares = {name: share for name, share in shares.items() if share or name in TIME_SHARES}
        if not times or any(share.keys() != times.keys() for share in shares.values()):
            return {}
        return {
            name: math.fsum(share[seed] * times[seed] for seed in times) / len(times) for name, share in shares.items()
        }


@dataclass(frozen=True, slots=True)
class StrategyResult(SeedGroup):
    """Result of a seed group; ``best``: it is the fastest of at least two groups, or as good."""

    standing: Standing
    best: bool


class Outcome(StrEnum):
    """The result of comparing the strategies of a case."""

    DECIDED = "decided"
    OPEN = "not decided"
    NO_RESULT = "no strategy has all its results"
    ALONE = "nothing to compare"


@dataclass(frozen=True, slots=True)
class Case:
    """All runs of one job: a result for each seed group, the fastest first; those without a time come last.

    ``baseline`` is the strategy that speedups are over, the same in all cases; empty where there is one only.
    """

    job: Mapping[str, str]
    results: Sequence[StrategyResult]
    comparison: Comparison[str]
    baseline: str

    @property
    def contested(self) -> bool:
        """Whether there is anything to compare."""
        return len(self.results) > 1

    @property
    def outcome(self) -> Outcome:
        """Whether a strategy wins."""
        if not self.contested:
            return Outcome.ALONE
        if not self.comparison.with_verdict(Verdict.FASTEST):
            return Outcome.NO_RESULT
        return Outcome.OPEN if self.comparison.with_verdict(Verdict.OPEN) else Outcome.DECIDED

    @property
    def winner(self) -> StrategyResult | None:
        """The fastest result; None if there is nothing to compare, or it is not decided."""
        return next((result for result in self.results if result.best), None)

    @property
    def first_and_ties(self) -> tuple[list[str], list[str]]:
        """The names of the fastest and of all that are as good; if not decided, who may win, and nothing."""
        first = self.comparison.with_verdict(Verdict.FASTEST)
        good = self.comparison.with_verdict(Verdict.AS_GOOD)
        undecided = self.comparison.with_verdict(Verdict.OPEN)
        return ([*first, *good, *undecided], []) if undecided else (first, good)

    @property
    def baseline_result(self) -> StrategyResult | None:
        """The plainest variant of the baseline; None if it did not run."""
        results = (result for result in self.results if result.strategy == self.baseline)
        return min(results, key=lambda result: result.plainness, default=None)

    @property
    def saving(self) -> dict[str, Any] | None:
        """Seconds of an iteration of baseline and winner, and its largest savings by class; None without either."""
        base = self.baseline_result
        winner = self.winner
        if not base or not winner or base is winner or not base.standing.time or not winner.standing.time:
            return None
        spent = winner.seconds_by_class
        saved = {name: seconds - spent[name] for name, seconds in base.seconds_by_class.items() if name in spent}
        least = LEAST_SHARE * math.fsum(part for part in saved.values() if part > 0)
        ranked = sorted(saved, key=lambda name: -saved[name])[:MAX_PARTS]
        parts = {name: saved[name] for name in ranked if saved[name] > least}
        return {"before": base.standing.time.mean, "after": winner.standing.time.mean, "parts": parts}

    def speedup(self, result: StrategyResult) -> Interval | None:
        """Return a result's speedup over the baseline; None without one, and for the baseline itself."""
        return None if result.strategy == self.baseline else result.standing.speedup

    @property
    def records(self) -> list[Record]:
        """All runs, group by group."""
        return [record for result in self.results for _, record in sorted(result.runs.items())]


def cases_of(records: Sequence[Record]) -> list[Case]:
    """Group records to cases, sorted by workload and model, then by order of appearance.

    The baseline is the first strategy of all records (``baseline_of``). Speedups are over its group with the same
    options, or else over its plainest one.
    """
    groups = groups_of(records)
    orders = {group.strategy: group.display_order for group in groups}
    baseline = baseline_of(orders) if len(orders) > 1 else ""
    jobs: dict[tuple[str, ...], list[SeedGroup]] = {}
    for group in groups:
        jobs.setdefault(tuple(group.job.values()), []).append(group)
    ordered = sorted(jobs.values(), key=lambda job: (job[0].job["workload"], job[0].job["model"]))
    return [_case(job, baseline) for job in ordered]


def _case(groups: Sequence[SeedGroup], baseline: str) -> Case:
    named = {group.name: group for group in groups}
    bases = sorted((group for group in groups if group.strategy == baseline), key=lambda group: group.plainness)
    same = {tuple(base.options.values()): base.name for base in bases}
    references = {
        group.name: same.get(tuple({**group.options, "strategy": baseline}.values()), bases[0].name)
        for group in groups
        if bases
    }
    comparison = compare({name: group.times for name, group in named.items()}, references)
    best = comparison.best if len(groups) > 1 else ()
    results = [
        StrategyResult(name, one.labels, one.job, one.runs, comparison.standings[name], name in best)
        for name, one in ((name, named[name]) for name in comparison.ranked)
    ]
    return Case(groups[0].job, results, comparison, baseline)


def groups_of(records: Iterable[Record]) -> list[SeedGroup]:
    """Group runs that differ only in their seed, in order of appearance."""
    alike: dict[str, list[Record]] = {}
    for record in records:
        # One comparison serves all seeds.
        config = {key: value for key, value in record.config.items() if key != "seed"}
        alike.setdefault(json.dumps([_names(record), config], default=repr), []).append(record)
    firsts = [first for first, *_ in alike.values()]
    labels = _labels(firsts)
    runs: dict[tuple[str, ...], dict[int, Record]] = {}
    for texts, same in zip(zip(*labels.values(), strict=True), alike.values(), strict=True):
        runs.setdefault(texts, {}).update({record.labels["seed"]: record for record in same})
    headings = [heading for heading, _ in labels]
    rows = [dict(zip(headings, texts, strict=True)) for texts in runs]
    owned = OWNED if len({row["strategy"] for row in rows}) > 1 else (*OWNED, *ASKED)
    job = [heading for heading, key in labels if key not in owned]
    apart = {
        strategy: ["strategy", *varying([row for row in rows if row["strategy"] == strategy], {"strategy", *job})]
        for strategy in {row["strategy"] for row in rows}
    }
    return [
        SeedGroup(name_of(row, apart[row["strategy"]]), row, {heading: row[heading] for heading in job}, by_seed)
        for row, by_seed in zip(rows, runs.values(), strict=True)
    ]


def varying(rows: Sequence[Mapping[str, str]], aside: Iterable[str] = ()) -> list[str]:
    """Return the headings, but those ``aside``, of labels in which some rows differ."""
    headings = [heading for heading in (rows[0] if rows else ()) if heading not in aside]
    return [heading for heading in headings if len({row[heading] for row in rows}) > 1]


def swept_paths(records: Sequence[Record]) -> list[str]:
    """Return the configuration paths, without the seed, that distinguish runs with equal names.

    Choices come first (a part's class, a device's name). Paths that follow from earlier ones are left out.
    """
    leaves = [_leaves(record) for record in records]
    values = {
        path: [repr(config.get(path, ABSENT)) for config in leaves]
        for path in dict.fromkeys(path for config in leaves for path in config)
    }
    seen = [_names(record) for record in records]
    kept = set[str]()
    for path in sorted(values, key=lambda path: (*_rank(path), -len({*values[path]}))):
        finer = [(*group, value) for group, value in zip(seen, values[path], strict=True)]
        if len({*finer}) > len({*seen}):
            kept.add(path)
            seen = finer
    return [path for path in values if path in kept]


def _labels(records: Sequence[Record]) -> dict[tuple[str, str], list[str]]:
    """Return by heading and configuration key the text for every record: names, then paths that distinguish records."""
    leaves = [_leaves(record) for record in records]
    labels = {(name, name): _texts([record.labels[name] for record in records], _spell) for name in NAMES}
    for path, heading in _headings(swept_paths(records)).items():
        spell = (lambda value: _spell(value).rpartition(".")[2]) if path.endswith("_target_") else _spell
        labels[heading, path.split(".")[0]] = _texts([config.get(path, ABSENT) for config in leaves], spell)
    return labels


def _leaves(record: Record) -> dict[str, Any]:
    return {path: value for path, value in flatten(record.config).items() if path != "seed"}


def _names(record: Record) -> tuple[str, ...]:
    return tuple(str(record.labels[name]) for name in NAMES)


def _rank(path: str) -> tuple[int, int]:
    """Return a sort key: choices first, outer before inner paths, descriptive text last."""
    words = path.split(".")
    if words[-1] in IDENTITIES:
        return 0, len(words)
    return (2 if COSMETIC_KEYS & {*words} else 1), 0


def _headings(paths: Sequence[str]) -> dict[str, str]:
    """Return a short heading for every path; the whole path if the short heading is not unique."""
    short = {path: path.removesuffix("._target_").removesuffix(".name").split(".", 1)[-1] for path in paths}
    taken = Counter([*NAMES, *short.values(), *(path for path in paths if path != short[path])])
    return {path: short[path] if taken[short[path]] == 1 else path for path in paths}


def _texts(values: Sequence[object], spell: Callable[[object], str]) -> list[str]:
    """Return values as single-line texts; texts are equal only for equal values."""
    shown = {repr(value): value for value in values}
    for spelling in (spell, _spell, repr):
        texts = {key: spelling(value) for key, value in shown.items()}
        if len({*texts.values()}) == len(texts):
            break
    return [texts[repr(value)] for value in values]


def _spell(value: object) -> str:
    if value == ABSENT:
        return "-"
    return (" ".join(value.split()) or repr(value)) if isinstance(value, str) else json.dumps(value, default=str)


def name_of(labels: Mapping[str, str], headings: Sequence[str]) -> str:
    """Return some labels as one text: names alone, other labels with their heading."""
    return " ".join(
        labels[heading] if heading in NAMES else f"{heading}={labels[heading]}"
        for heading in headings
        if heading in labels
    )
