"""Group runs by job (cases) and by configuration (seed groups), and compare them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from entrain_bench.answers.comparison import TIME, Comparison, Standing, baseline_of, compare
from entrain_bench.records.keys import COSMETIC_KEYS
from entrain_bench.records.leaves import flatten
from entrain_bench.records.records import LABELS, Record

# The texts of all labels that tell a group from the others of its case.
type Own = tuple[str, ...]

NAMES = tuple(name for name in LABELS if name != "seed")
# Last words of paths that say what was chosen: the class of a part, the name of a device.
IDENTITIES = ("_target_", "name")
# What a strategy owns: runs that differ here alone do the same job.
OWNED = ("strategy",)
# Keys that the user sets for all strategies; of a single strategy, its variants.
ASKED = ("layout", "microbatch_size")
# What stands for a key that a configuration does not have.
ABSENT = ()


@dataclass(frozen=True, slots=True)
class SeedGroup:
    """All runs of one configuration, one per seed.

    Attributes:
        labels: text of every label, by its heading; no two groups share all labels.
        job: the labels that define the job.
        runs: records by seed.
    """

    labels: Mapping[str, str]
    job: Mapping[str, str]
    runs: Mapping[int, Record]

    @property
    def own(self) -> dict[str, str]:
        """The labels that do not define the job: strategy and its options."""
        return {heading: text for heading, text in self.labels.items() if heading not in self.job}

    @property
    def strategy(self) -> str:
        """The strategy's name."""
        return self.labels["strategy"]

    @property
    def display_order(self) -> float | None:
        """The strategy's place in figures; None if it states none."""
        order = next(iter(self.runs.values())).config["strategy"].get("display_order")
        return None if order is None else float(order)

    @property
    def family(self) -> str:
        """The family that the strategy states; empty if it states none."""
        return str(next(iter(self.runs.values())).config["strategy"].get("family") or "")

    @property
    def plainness(self) -> tuple[int, int, Own]:
        """Sort key for the variants of a strategy: most seeds first, then fewest overrides, then labels."""
        num_overrides = min(len(record.overrides) for record in self.runs.values())
        return -len(self.runs), num_overrides, tuple(self.own.values())

    @property
    def times(self) -> dict[int, float | None]:
        """Seconds per iteration by seed; None for a run without a result."""
        done = self.values(TIME)
        return {seed: done.get(seed) for seed in sorted(self.runs)}

    def values(self, metric: str) -> dict[int, float]:
        """A metric of the runs that succeeded and measured it, by seed."""
        done = {seed: self.runs[seed].metrics for seed in sorted(self.runs) if self.runs[seed].status == "ok"}
        return {seed: metrics[metric] for seed, metrics in done.items() if metrics.get(metric) is not None}


@dataclass(frozen=True, slots=True)
class StrategyResult:
    """Result of a seed group; ``best``: it is the fastest of at least two groups, or as good."""

    group: SeedGroup
    standing: Standing
    best: bool


@dataclass(frozen=True, slots=True)
class Case:
    """All runs of one job.

    Attributes:
        job: labels that define the job, by heading.
        groups: seed groups, fastest first; groups without a result come last.
        comparison: their comparison, by the same names.
        baseline: the strategy that speedups are over, of all cases of the same records; empty where there is one only.
    """

    job: Mapping[str, str]
    groups: Mapping[Own, SeedGroup]
    comparison: Comparison[Own]
    baseline: str

    @property
    def contested(self) -> bool:
        """Whether there is anything to compare."""
        return len(self.groups) > 1

    @property
    def freedom(self) -> int:
        """Number of requested keys that planners choose."""
        config = self.records[0].config
        return [*flatten({key: config.get(key) for key in ASKED}).values()].count(None)

    @property
    def best(self) -> Sequence[Own]:
        """Names of the fastest group and of all that are as good; empty if there is nothing to compare."""
        return self.comparison.best if self.contested else ()

    @property
    def results(self) -> list[StrategyResult]:
        """One for each group."""
        standings = self.comparison.standings
        return [StrategyResult(group, standings[own], own in self.best) for own, group in self.groups.items()]

    @property
    def records(self) -> list[Record]:
        """All runs, group by group."""
        return [record for group in self.groups.values() for _, record in sorted(group.runs.items())]


def cases_of(records: Sequence[Record]) -> list[Case]:
    """Group records to cases, sorted by workload and model, then by order of appearance.

    The baseline is the first strategy of all records (``baseline_of``). Speedups are over its group with the same
    parameters, or else over its plainest one.
    """
    groups = groups_of(records) if records else []
    orders = {group.strategy: group.display_order for group in groups}
    baseline = baseline_of(orders) if len(orders) > 1 else ""
    jobs: dict[Own, list[SeedGroup]] = {}
    for group in groups:
        jobs.setdefault(tuple(group.job.values()), []).append(group)
    ordered = sorted(jobs.values(), key=lambda job: (job[0].job["workload"], job[0].job["model"]))
    return [_case(job, baseline) for job in ordered]


def _case(groups: Sequence[SeedGroup], baseline: str) -> Case:
    named = {tuple(group.own.values()): group for group in groups}
    times = {own: group.times for own, group in named.items()}
    num_batches = min(max(1, len(record.iterations)) for group in groups for record in group.runs.values())
    comparison = compare(times, _references(named, baseline), num_batches=num_batches)
    return Case(groups[0].job, {own: named[own] for own in comparison.ranked}, comparison, baseline)


def _references(named: Mapping[Own, SeedGroup], baseline: str) -> dict[Own, Own]:
    """Return the baseline's group that each group's speedup refers to."""
    bases = sorted(
        (own for own, group in named.items() if group.strategy == baseline), key=lambda own: named[own].plainness
    )
    same = {own: tuple({**group.own, "strategy": baseline}.values()) for own, group in named.items()}
    return {own: same[own] if same[own] in bases else bases[0] for own in named if bases}


def groups_of(records: Sequence[Record]) -> list[SeedGroup]:
    """Group runs that differ only in their seed, in order of appearance."""
    alike: dict[str, list[Record]] = {}
    for record in records:
        # What is compared once need not be compared for every seed.
        config = {key: value for key, value in record.config.items() if key != "seed"}
        alike.setdefault(json.dumps([_names(record), config], default=repr), []).append(record)
    firsts = [first for first, *_ in alike.values()]
    labels = _labels(firsts)
    owned = OWNED if len({first.labels["strategy"] for first in firsts}) > 1 else (*OWNED, *ASKED)
    runs: dict[Own, dict[int, Record]] = {}
    for texts, same in zip(zip(*labels.values(), strict=True), alike.values(), strict=True):
        runs.setdefault(texts, {}).update({record.labels["seed"]: record for record in same})
    groups = []
    for texts, found in runs.items():
        named = {heading: text for (heading, _), text in zip(labels, texts, strict=True)}
        groups.append(SeedGroup(named, {heading: named[heading] for heading, key in labels if key not in owned}, found))
    return groups


def swept_paths(records: Sequence[Record]) -> list[str]:
    """Return the configuration paths, without the seed, that distinguish runs with equal names.

    Choices come first (a part's class, a device's name). Paths that follow from earlier ones, such as the parameters of
    a part, are left out.
    """
    leaves = [_leaves(record) for record in records]
    seen = [_names(record) for record in records]
    kept = set[str]()
    for path in sorted(_differing(seen, leaves), key=_rank):
        values = [{path: each.get(path, ABSENT)} for each in leaves]
        if _differing(seen, values):
            kept.add(path)
            seen = [(*each, repr(value)) for each, value in zip(seen, values, strict=True)]
    return [path for path in dict.fromkeys(path for each in leaves for path in each) if path in kept]


def _labels(records: Sequence[Record]) -> dict[tuple[str, str], list[str]]:
    """Return the labels of all records: their names, then the paths that distinguish them.

    Returns:
        By heading and configuration key, the text for every record.
    """
    leaves = [_leaves(record) for record in records]
    found = {(name, name): _texts([record.labels[name] for record in records], _spell) for name in NAMES}
    for path, heading in _headings(swept_paths(records)).items():
        spell = (lambda value: _spell(value).rpartition(".")[2]) if path.endswith("_target_") else _spell
        found[heading, path.split(".")[0]] = _texts([each.get(path, ABSENT) for each in leaves], spell)
    return found


def _leaves(record: Record) -> dict[str, Any]:
    return {path: value for path, value in flatten(record.config).items() if path != "seed"}


def _names(record: Record) -> tuple[str, ...]:
    return tuple(str(record.labels[name]) for name in NAMES)


def _differing(groups: Sequence[tuple[str, ...]], mappings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the paths at which mappings of one group differ."""
    first: dict[tuple[str, ...], Mapping[str, Any]] = {}
    found: dict[str, None] = {}
    for group, values in zip(groups, mappings, strict=True):
        other = first.setdefault(group, values)
        for path in {**other, **values}:
            if path not in found and repr(values.get(path, ABSENT)) != repr(other.get(path, ABSENT)):
                found[path] = None
    return [*found]


def _rank(path: str) -> tuple[int, int]:
    """Return a sort key: choices first, outer before inner paths, descriptive text last."""
    words = path.split(".")
    if words[-1] in IDENTITIES:
        return 0, len(words)
    return (2 if COSMETIC_KEYS & {*words} else 1), 0


def _headings(paths: Sequence[str]) -> dict[str, str]:
    """Return a short heading for every path; the whole path if the short heading is not unique."""
    stems = {path: path.removesuffix("._target_").removesuffix(".name") for path in paths}
    short = {path: stem.split(".", 1)[-1] for path, stem in stems.items()}
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
