"""What a sweep varies, in words, and how its variants compare seed by seed."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from entrain_bench.records.cases import swept_paths
from entrain_bench.records.records import LABELS, Record, flatten
from entrain_bench.records.statistics import not_worse, ratio_interval

TIME = "iteration_time_s"
# Labels that say what job a run is, in the order of names.
JOB = tuple(name for name in LABELS if name not in ("strategy", "seed"))
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
        variant: its strategy, and what is swept inside of it.
        case: everything else that is swept, the seed apart.
        setting: hash of all that a strategy does not own, the seed apart.
    """

    record: Record
    variant: str
    case: str
    setting: str

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.record.labels["seed"])

    @property
    def time_s(self) -> float | None:
        """Seconds an iteration; None without a result."""
        return self.record.metrics.get(TIME) if self.record.status == "ok" else None

    @property
    def name(self) -> str:
        """What tells the run from the others of its sweep."""
        return f"{self.variant}{' ' * bool(self.case)}{self.case} seed {self.seed}"


def points_of(records: Sequence[Record]) -> list[Point]:
    """The places of a sweep's records, in their order."""
    varied = [name for name in JOB if len({str(record.labels[name]) for record in records}) > 1]
    paths = swept_paths(records)
    points = []
    for record in records:
        leaves = flatten(record.config)
        swept = {path: _spell(path, leaves[path]) for path in paths if path in leaves}
        own = [text for path, text in swept.items() if path.startswith("strategy.")]
        rest = [text for path, text in swept.items() if not path.startswith("strategy.")]
        case = [*(str(record.labels[name]) for name in varied), *rest]
        variant = " ".join([str(record.labels["strategy"]), *own])
        points.append(Point(record, variant, " ".join(case), _setting(record.config)))
    return points


def _spell(path: str, value: Any) -> str:
    """A swept value; of a part its class."""
    if path.endswith("._target_"):
        return f"{path.removesuffix('._target_').rpartition('.')[2]}={str(value).rpartition('.')[2]}"
    return f"{path.removeprefix('strategy.')}={value}"


def _setting(config: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in config.items() if name not in ("strategy", "seed")}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()[:16]


def sweep_name(overrides: Sequence[str]) -> str:
    """What a sweep is called: its figure if it is just that, else its overrides; ``defaults`` without any."""
    texts = [text for text in overrides if not text.lstrip("+").startswith(ASIDE)]
    name = texts[0].removeprefix("figure=") if len(texts) == 1 else " ".join(texts)
    if len(name) > MAX_NAME:
        return f"{name[:MAX_NAME]}... {hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return name or "defaults"


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the variants of a sweep compare.

    Attributes:
        baseline: the variant that speed-ups are over; empty if there is none.
        of_runs: speed-up of every run over the baseline's run of the same job and seed, by its key.
        of_variants: the geometric mean of a variant's speed-ups, in the variants' order.
        best: the variants of every case that are not significantly slower than its fastest, that first.
    """

    baseline: str
    of_runs: Mapping[str, float]
    of_variants: Mapping[str, float]
    best: Mapping[str, Sequence[str]]

    @property
    def wins(self) -> list[tuple[str, int]]:
        """How often each variant is the fastest of a case, the most frequent first."""
        return Counter(names[0] for names in self.best.values()).most_common()


def compare(points: Sequence[Point]) -> Comparison:
    """Compare the variants of a sweep."""
    baseline = _baseline(points)
    times = {(p.setting, p.seed): p.time_s for p in points if p.variant == baseline and p.time_s}
    pairs: dict[str, list[tuple[float, float]]] = {}
    of_runs = {}
    for point in points:
        reference = times.get((point.setting, point.seed))
        if point.time_s and reference:
            of_runs[point.record.key] = reference / point.time_s
            pairs.setdefault(point.variant, []).append((reference, point.time_s))
    means = {
        variant: ratio_interval([one for one, _ in both], [other for _, other in both]).mean
        for variant, both in pairs.items()
    }
    return Comparison(baseline, of_runs, means, _best(points))


def _baseline(points: Sequence[Point]) -> str:
    """The variant that comes first in figures; empty if that is not one, or the only one."""
    places = {point.variant: _place(point.record) for point in points}
    first = [variant for variant, place in places.items() if place == min(places.values())]
    return first[0] if len(first) == 1 and len(places) > 1 and math.isfinite(places[first[0]]) else ""


def _place(record: Record) -> float:
    order = record.config["strategy"].get("display_order")
    return math.inf if order is None else float(order)


def times_by_case(points: Iterable[Point]) -> dict[str, dict[str, dict[int, float | None]]]:
    """Seconds an iteration by case, variant and seed; None without a result."""
    found: dict[str, dict[str, dict[int, float | None]]] = {}
    for point in points:
        found.setdefault(point.case, {}).setdefault(point.variant, {})[point.seed] = point.time_s
    return found


def _best(points: Sequence[Point]) -> dict[str, list[str]]:
    best = {}
    for case, variants in times_by_case(points).items():
        seeds = sorted({seed for times in variants.values() for seed in times})
        whole = {
            variant: [time for seed in seeds if (time := times.get(seed))]
            for variant, times in variants.items()
            if all(times.get(seed) for seed in seeds)
        }
        if len(variants) > 1 and whole:
            chosen, totals = not_worse(whole), {variant: sum(each) for variant, each in whole.items()}
            best[case] = sorted((variant for variant in whole if variant in chosen), key=totals.__getitem__)
    return best


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
