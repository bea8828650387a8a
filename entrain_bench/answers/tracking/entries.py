"""Runs as MLflow shows them: names, tags, parameters, metrics and artifacts made of records; an experiment's page."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from entrain_bench.answers.answer import Answer, Pictures, Point
from entrain_bench.answers.comparison import TIME
from entrain_bench.answers.labels import cost_source
from entrain_bench.answers.report.build import answer_report, html
from entrain_bench.answers.sentences import run_notices, sample_notices, sentences
from entrain_bench.answers.tracking.datasets import Dataset, dataset_of
from entrain_bench.answers.tracking.words import describe_sweep, description, shortened, summary_markdown
from entrain_bench.records.leaves import parameters_text
from entrain_bench.records.records import LABELS, METRICS, Record, Results
from entrain_bench.records.tables import table_csv
from entrain_bench.specs.framework import FrameworkOptions

# Other pages are made for generative models.
KIND = {"mlflow.experimentKind": "custom_model_development"}
WORKFLOW = {"workflowType": "machine_learning"}
# The name under which a page's link finds its view among the experiment's tags.
VIEW = "fastest_first"
SHOWN = (TIME, "gap_to_lower_bound", "bubble_ratio", "peak_memory_bytes")
# Which job a run does, in a sweep of several jobs.
CASE_TAG = "case"


def page_tags(first: Sequence[str] = (), by_case: bool = False) -> dict[str, str]:
    """Tags of an experiment that make its page, with some metrics first next to the iteration time.

    ``by_case`` groups runs by their case: times of different jobs are not comparable.
    """
    time, *others = SHOWN
    groups = {"aggregateFunction": "average", "groupByKeys": [{"mode": "tag", "groupByData": CASE_TAG}]}
    view = {
        "searchFilter": f"tags.`{CURRENT_TAG}` = 'yes'",
        "orderByKey": f"metrics.`{TIME}`",
        "orderByAsc": True,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "selectedColumns": [f"metrics.`{name}`" for name in (time, *first, *others)],
        **({"groupBy": groups} if by_case else {}),
    }
    return {**KIND, f"mlflow.sharedViewState.{VIEW}": json.dumps(view)}


def experiments_link(base: str) -> str:
    """Address of all experiments on a server; its root shows MLflow's pages for GenAI."""
    return f"{base}/#/experiments?{urlencode(WORKFLOW)}"


def runs_link(base: str, experiment: str) -> str:
    """Address of an experiment's runs on a server."""
    return f"{base}/#/experiments/{experiment}/runs?{urlencode({**WORKFLOW, 'viewStateShareKey': VIEW})}"


def answer_link(base: str, experiment: str, run_id: str) -> str:
    """Address of the answer of a sweep, a page in the artifacts of its parent run."""
    return f"{base}/#/experiments/{experiment}/runs/{run_id}/artifacts/{ANSWER_PAGE}?{urlencode(WORKFLOW)}"


KEY_TAG, DIGEST_TAG, CONFIGURATION_TAG = (f"entrain_bench.{name}" for name in ("key", "digest", "configuration"))
PARENT_TAG = "mlflow.parentRunId"
NOTE_TAG = "mlflow.note.content"
# Whether the present code makes a run: yes or no.
CURRENT_TAG = "current"
# What ``Logged`` holds besides the identifier, in its order.
LOGGED_TAGS = (KEY_TAG, DIGEST_TAG, CONFIGURATION_TAG, CURRENT_TAG)
# The key of the parent of a sweep's runs.
SWEEP = "sweep"
# An artifact of the parent.
ANSWER_PAGE = "answer.html"
PARTS = ("planner", "assigner", "scheduler")
# What a store takes of a name and of a text.
MAX_NAME = 250
MAX_TEXT = 6000
# Of a run: more columns than that are not read.
MAX_PARAMETERS = 30
USUAL = asdict(FrameworkOptions()) | {"constants": 0}
# Characters that no parameter or metric may have in its name.
FORBIDDEN = re.compile(r"[^/\w.\- :]")
# MLflow sorts metrics by name, and its comparison has room for six: what answers goes first, series go last.
ANSWER = "answer"
SERIES = "values_by_iteration"
# Runs of a sweep that have everything in the store. A run of a larger one has ``MAIN`` metrics and what not all runs
# share; the records have the rest.
MAX_DETAILED = 100
MAIN = (
    *(TIME, "samples_per_s", "tflops_per_gpu", "mfu", "bubble_ratio", "exposed_comm_s", "peak_memory_bytes"),
    "gap_to_lower_bound",
)
# What a planner was left to choose.
FREE = "planner's choice"
# A file, what is to be in one, or what makes that when it is logged: follows from the run's key.
type Artifact = Path | bytes | Callable[[], bytes]


@dataclass(frozen=True, slots=True)
class Logged:
    """A run that a store has, by the tags that it was logged with; its digest is empty if it was not logged whole."""

    run_id: str
    key: str
    digest: str
    configuration: str
    current: str

    @classmethod
    def of(cls, run_id: str, tags: Mapping[str, str]) -> Logged:
        """A run by all its tags."""
        return cls(run_id, *(tags.get(name, "") for name in LOGGED_TAGS))


@dataclass(frozen=True, slots=True)
class Entry:
    """One run as MLflow shows it.

    Attributes:
        key: what it is known by: a record's key, or ``SWEEP``.
        metrics: headline numbers.
        series: what each iteration measured.
        artifacts: by their paths in the run.
        dataset: where its samples are from; None if that cannot be read now.
        started_ms: when it was made, since 1970; None if that is not recorded.
        duration_ms: how long its iterations take, simulated or trained; of a parent, from its first run to its last.
    """

    key: str
    name: str
    failed: bool
    tags: Mapping[str, str]
    params: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    series: Sequence[Mapping[str, float]] = ()
    artifacts: Mapping[str, Artifact] = field(default_factory=dict)
    dataset: Dataset | None = None
    started_ms: int | None = None
    duration_ms: int = 0

    @property
    def steps(self) -> Iterator[tuple[int, str, float]]:
        """Iteration, name and value of what each iteration measured."""
        for step, row in enumerate(self.series):
            for name, value in row.items():
                yield step, f"{SERIES}/{name}", value

    @property
    def digest(self) -> str:
        """Hash of what is shown: an entry whose digest is known need not be logged again."""
        files = self.artifacts.items()
        contents = {path: hashlib.sha256(one).hexdigest() if isinstance(one, bytes) else "" for path, one in files}
        data = asdict(self.dataset) if self.dataset else None
        made = [data, self.started_ms, self.duration_ms]
        shown = [self.name, self.failed, self.tags, self.params, self.metrics, [*self.series], contents, made]
        return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()[:16]


def content_of(artifact: Artifact) -> bytes:
    """Return the content of an artifact."""
    if isinstance(artifact, Path):
        return artifact.read_bytes()
    return artifact if isinstance(artifact, bytes) else artifact()


def entries_of(
    results: Results,
    records: Sequence[Record],
    name: str,
    files: Sequence[Path] = (),
    pictures: Pictures | None = None,
    lost: Sequence[str] = (),
) -> list[Entry]:
    """A sweep's runs after their parent, or a single run.

    Ranks are drawn of the fastest strategy and the baseline, of the same job and seed: of all strategies it would take
    as long as simulating them. ``files`` are figures of the sweep, ``lost`` the overrides of planned runs without a
    record.
    """
    answer = Answer.of(records, lost)
    points = [*answer.points()]
    if len(records) == 1:
        return [_entry_of(points[0], name, "", results, detailed=True)]
    drawn = dict[str, Artifact]()
    standings = None
    if pictures:
        for variant, one in answer.side_by_side(
            lambda record: bool(record.timeline) and results.has_timeline(record)
        ).items():
            if variant == answer.fastest or one.labels["strategy"] == answer.baseline:
                drawn[f"ranks/{clean(shortened(variant))}.png"] = partial(pictures.ranks, one)
        # Two artifacts show it.
        standings = cache(partial(pictures.standings, answer))
        drawn["iteration_time.png"] = standings
    drawn[ANSWER_PAGE] = lambda: html(answer_report(answer, str(results.root), standings and standings())).encode()
    parent = _parent(answer, name, results, files, drawn)
    detailed = len(points) <= MAX_DETAILED
    runs = [_entry_of(point, point.name, answer.baseline, results, detailed) for point in points]
    if detailed:
        return [parent, *runs]
    params, own_params = _split([run.params for run in runs])
    tags, own_tags = _split([run.tags for run in runs])
    slim = [replace(run, params=own_params[place], tags=own_tags[place]) for place, run in enumerate(runs)]
    return [replace(parent, params=params, tags={**parent.tags, **tags}), *slim]


def _split(texts: Sequence[Mapping[str, str]]) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Split mappings into their shared items and the rest of each; lone runs keep their configuration."""
    shared = {name: text for name, text in texts[0].items() if all(each.get(name) == text for each in texts)}
    aside = {*shared, CONFIGURATION_TAG}
    return shared, [{name: text for name, text in each.items() if name not in aside} for each in texts]


def _entry_of(point: Point, name: str, baseline: str, results: Results, detailed: bool) -> Entry:
    """A run; unless ``detailed``, without record, series, metrics but ``MAIN``, and settings that are as usual."""
    record = point.record
    metrics = {name: record.metrics[name] for name in (METRICS if detailed else MAIN) if name in record.metrics}
    if TIME in metrics:
        metrics[f"{ANSWER}/{TIME}"] = metrics[TIME]
    if point.gain is not None:
        metrics[speedup_name(baseline)] = point.gain
    files = {"record.json": results.record_path(record.key), "chrome_trace.json": results.trace_path(record.key)}
    artifacts = {path: file for path, file in files.items() if detailed and file.exists()}
    series = record.iterations if detailed else ()
    failed = record.status == "failed"
    params = parameters(record, detailed)
    tags = _tags(record) | ({CASE_TAG: point.case[:MAX_TEXT]} if point.case else {})
    data = dataset_of(record.config["workload"], str(record.labels["workload"]))
    started_ms = made_ms(record)
    spent_s = sum(row.get(TIME, 0.0) for row in record.iterations)
    duration_ms = round(1e3 * spent_s) if math.isfinite(spent_s) else 0
    return Entry(
        record.key, name[:MAX_NAME], failed, tags, params, metrics, series, artifacts, data, started_ms, duration_ms
    )


def made_ms(record: Record) -> int | None:
    """When a record was made, in milliseconds since 1970; None if that is not recorded."""
    return round(1e3 * datetime.fromisoformat(record.made_at).timestamp()) if record.made_at else None


def parameters(record: Record, detailed: bool = True) -> dict[str, str]:
    """Return a run's parameters as texts: labels, requested and chosen degrees, parts with their parameters, settings.

    Of more than ``MAX_PARAMETERS`` the last are left out: first the framework's settings that are as usual. All are in
    the record.
    """
    config = record.config
    # Sorted, as a record is when it is read again.
    requested = (f"{name}={FREE if value is None else value}" for name, value in sorted(config["layout"].items()))
    usual = [name for name, value in USUAL.items() if config.get(name) == value]
    values: dict[str, Any] = {
        **{name: record.labels[name] for name in (*LABELS, *PARTS)},
        "requested": ", ".join(requested),
        "strategy_parameters": parameters_text(config["strategy"]) if detailed else None,
        "workload_parameters": parameters_text(config["workload"]) if detailed else None,
        **{f"chosen.{name}": value for name, value in record.layout.items()},
        **{name: value for name, value in record.settings.items() if name not in usual},
        **({name: record.settings[name] for name in usual} if detailed else {}),
    }
    texts = {clean(name): str(value)[:MAX_TEXT] for name, value in values.items() if value is not None}
    filled = [(name, text) for name, text in texts.items() if text]
    return dict(filled[:MAX_PARAMETERS])


def _tags(record: Record) -> dict[str, str]:
    tags = {
        "status": record.status,
        "reason": record.reason,
        "code_version": record.code_version,
        "host": record.host,
        "executor": str(record.labels["harness"]),
        "cost_source": cost_source(record.config["cluster"]),
        "execution": ", ".join(f"{name} {value}" for name, value in sorted(record.execution.items())),
        "samples": "; ".join(sample_notices([record])),
        "remarks": "; ".join(run_notices([record])),
        CONFIGURATION_TAG: hashlib.sha256(json.dumps(record.config, sort_keys=True).encode()).hexdigest()[:16],
    }
    return {name: text[:MAX_TEXT] for name, text in tags.items() if text}


def _parent(
    answer: Answer, name: str, results: Results, files: Sequence[Path], pictures: Mapping[str, Artifact]
) -> Entry:
    words = summary_markdown(name, answer, str(results.root))
    records = [*answer.records, *answer.draws]
    made = [moment for record in records if (moment := made_ms(record)) is not None]
    started_ms, duration_ms = (min(made), max(made) - min(made)) if made else (None, 0)
    metrics = {"num_runs": float(len(records)), "num_ok": float(sum(record.status == "ok" for record in records))}
    metrics |= {clean(f"speedup/{variant}"): found.speedup.mean for variant, found in answer.overall.items()}
    tags = {NOTE_TAG: description(answer)[:MAX_TEXT], "sweep": describe_sweep(records)[:MAX_TEXT]}
    tags |= {key: text for key, text in (("best_strategy", answer.fastest), ("baseline", answer.baseline)) if text}
    if answer.overall:
        metrics["best_speedup"] = max(found.speedup.mean for found in answer.overall.values())
    drawn = {f"figures/{file.name}": file.read_bytes() for file in files}
    found = {"sentences": sentences(answer), "cases": answer.case_dicts(str(results.root))}
    tables = {
        "summary.md": words.encode(),
        "answer.json": (json.dumps(found, indent=1) + "\n").encode(),
        "table.csv": table_csv(records).encode(),
    }
    artifacts = {**tables, **drawn, **pictures}
    return Entry(SWEEP, name[:MAX_NAME], False, tags, {}, metrics, (), artifacts, None, started_ms, duration_ms)


def speedup_name(baseline: str) -> str:
    """The metric that holds the speedup over a strategy."""
    return clean(f"{ANSWER}/speedup_over_{baseline}")


def clean(name: str) -> str:
    """A name that MLflow takes for a parameter or a metric."""
    return FORBIDDEN.sub("_", name)[:MAX_NAME]
