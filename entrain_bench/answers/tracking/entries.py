"""Entries of MLflow: a run for every case and strategy, its seeds as steps, and their sweep as a parent."""

from __future__ import annotations

import getpass
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache, lru_cache, partial
from itertools import product, zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
import yaml

from entrain_bench.answers.answer import Answer
from entrain_bench.answers.commands import COMMAND, commands_of, decisive_overrides
from entrain_bench.answers.labels import cost_source
from entrain_bench.answers.report import html, markdown, report_json, report_of
from entrain_bench.answers.sentences import notices, run_notices, sample_notices, sentences
from entrain_bench.base.errors import UserError
from entrain_bench.config.targets import check_targets, instantiate
from entrain_bench.config.tree import config_tree
from entrain_bench.records.leaves import flatten
from entrain_bench.records.metrics import TIME
from entrain_bench.records.records import LABELS, Record, Results
from entrain_bench.records.tables import GAP, table_of, with_bounds

# Metrics of a run, before those of a folder of the user's. With speedup and ``BY_ITERATION`` these are 20; the table
# of the sweep has all.
SHOWN = (
    *(TIME, "samples_per_s", "tokens_per_s", "tflops_per_gpu", "mfu", "bubble_ratio", "exposed_comm_s"),
    *("encoder_forward_std_ms", "llm_forward_std_ms", "peak_memory_bytes", GAP, "cluster_bound_s"),
    *("believed_time_s", "planning_time_s", "assignment_time_s", "assignment_exposed_s"),
)
# Metrics of training, whose steps are iterations.
BY_ITERATION = ("loss", "grad_norm", "input_stall_s")
# MLflow's comparison draws the first three parameters that differ, capitals before other letters.
CAPITALS = {"strategy": "Strategy", "workload": "Workload"}
DEGREES = ("tp", "cp", "pp", "dp")
# The case of a parent.
SWEEP = "sweep"
# Longest names of a run and of a parameter or metric, and longest text in a store, in characters.
MAX_NAME = 500
MAX_KEY = 250
MAX_TEXT = 6000
# Characters that no parameter or metric may have in its name.
FORBIDDEN = re.compile(r"[^/\w.\- :]")
# An artifact of a sweep's parent run.
ANSWER_PAGE = "answer.html"
# Tags of a parent: the short answer, and the baseline of speedups.
NOTE_TAG = "mlflow.note.content"
BASELINE_TAG = "baseline"
# Draws the iteration times of an answer, as PNG.
type DrawStandings = Callable[[Answer], bytes]


@dataclass(frozen=True, slots=True)
class Entry:
    """One run as MLflow shows it.

    Attributes:
        case: hash of the configuration that its seeds share, or ``SWEEP``.
        metrics: values by step: seeds, then their mean as the last; iterations for ``BY_ITERATION``.
        artifacts: functions that make the content of each file, by path.
        dataset: name, digest and configuration (JSON) of its workload; None if its files cannot be read now.
        made_ms: time of its first and last record, since 1970; empty if that is not recorded.
    """

    case: str
    name: str
    failed: bool
    tags: Mapping[str, str]
    params: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    artifacts: Mapping[str, Callable[[], bytes]] = field(default_factory=dict)
    table: Callable[[], pd.DataFrame] | None = None
    dataset: tuple[str, str, str] | None = None
    made_ms: Sequence[int] = ()

    @property
    def digest(self) -> str:
        """Return a hash of all that is shown."""
        files = sorted(self.artifacts)
        return digest_of(
            [self.name, self.failed, self.tags, self.params, self.metrics, files, self.dataset, self.made_ms]
        )


def entries_of(
    results: Results,
    records: Sequence[Record],
    name: str,
    files: Sequence[Path] = (),
    draw: DrawStandings | None = None,
    lost: Sequence[str] = (),
) -> list[Entry]:
    """Return the cases of a sweep after their parent, or a single run.

    ``files`` are figures of the sweep, ``lost`` the overrides of planned runs without a record.
    """
    if len(records) == 1:
        record = with_bounds(records[0])
        paths = {"record.json": results.record_path(record.key), "chrome_trace.json": results.trace_path(record.key)}
        return [_entry(results, {record.labels["seed"]: record}, name, files=paths, apart="")]
    answer = Answer.of(records, lost)
    gain = clean(f"speedup_over_{answer.baseline}")
    cases = []
    for case in answer.cases:
        where = answer.case_name(case)
        for result in case.results:
            mean = result.standing.speedup
            gains = {gain: _with_mean(result.standing.gains, mean.mean)} if mean else {}
            runs = dict(sorted(result.runs.items()))
            cases.append(_entry(results, runs, f"{result.name} {where}".strip(), where, gains))
    return [_parent(answer, name, results, files, draw), *cases]


def _entry(
    results: Results,
    runs: Mapping[int, Record],
    name: str,
    where: str = "",
    speedup: Mapping[str, Mapping[int, float]] | None = None,
    files: Mapping[str, Path] | None = None,
    apart: str = "seed",
) -> Entry:
    """Show records by step as one run; their configurations differ in the key ``apart`` only."""
    records = [*runs.values()]
    done = {step: record for step, record in runs.items() if record.status == "ok"}
    names = (*SHOWN, *dict.fromkeys(name for record in records for name in record.added))
    values = {name: {step: one.metrics[name] for step, one in done.items() if name in one.metrics} for name in names}
    metrics = {name: _with_mean(by_step, fmean(by_step.values())) for name, by_step in values.items() if by_step}
    workload = json.dumps(records[0].config["workload"], sort_keys=True)
    return Entry(
        digest_of({key: value for key, value in records[0].config.items() if key != apart}),
        name[:MAX_NAME],
        failed=any(record.status == "failed" for record in records),
        tags=_tags(records, where, results),
        params=parameters(records),
        metrics={**metrics, **(speedup or {}), **_by_iteration([*done.values()])},
        artifacts={path: file.read_bytes for path, file in (files or {}).items() if file.exists()},
        dataset=_dataset(workload, str(records[0].labels["workload"])),
        made_ms=_made_ms(records),
    )


def _with_mean(values: Mapping[int, float], mean: float) -> dict[int, float]:
    """Append the mean of several values, so that it is the metric's last; one value is its own mean."""
    return {**values, **({max(values) + 1: mean} if len(values) > 1 else {})}


def _by_iteration(records: Sequence[Record]) -> dict[str, dict[int, float]]:
    rows = [*zip_longest(*(record.iterations for record in records), fillvalue={})]
    values = {name: [[row[name] for row in same if name in row] for same in rows] for name in BY_ITERATION}
    means = {name: {step: fmean(seeds) for step, seeds in enumerate(lists) if seeds} for name, lists in values.items()}
    return {name: steps for name, steps in means.items() if steps}


def parameters(records: Sequence[Record]) -> dict[str, Any]:
    """Return names of the job, keys that do not have their defaults, and degrees, requested and chosen.

    A degree that a planner chose differently for some seeds is a text of all its values.
    """
    first = records[0]
    config = flatten(first.config)
    values = {CAPITALS.get(label, label): first.labels[label] for label in LABELS if label != "seed"}
    values |= {f"layout.{name}": degree for name in DEGREES if (degree := first.config["layout"][name]) is not None}
    for key, text in decisive_overrides(first.overrides, first.config_dir).items():
        value = config.get(key.lstrip("+"), text.removeprefix("="))
        if key not in LABELS and (key not in _defaults() or value != _defaults()[key]):
            values[key.lstrip("+~")] = "null" if value is None else value
    for module, name in product(first.degrees, DEGREES):
        chosen = {record.degrees[module][name] for record in records if module in record.degrees}
        values[f"chosen.{module}.{name}"] = ", ".join(map(str, sorted(chosen)))
    return {clean(name): value[:MAX_TEXT] if isinstance(value, str) else value for name, value in values.items()}


@cache
def _defaults() -> dict[str, Any]:
    return flatten(yaml.safe_load((config_tree() / "config.yaml").read_text()))


def _tags(records: Sequence[Record], where: str, results: Results) -> dict[str, str]:
    states = Counter(record.status for record in records)
    tags = {
        "case": where,
        "code_version": records[0].code_version,
        "status": records[0].status if len(states) == 1 else ", ".join(f"{n} {state}" for state, n in states.items()),
        "reason": _once(record.reason for record in records),
        "host": _once(record.host for record in records),
        "cost_source": cost_source(records[0].config["cluster"]),
        "execution": _once(f"{name} {text}" for one in records for name, text in sorted(one.execution.items())),
        "samples": "; ".join(sample_notices(records)),
        "remarks": "; ".join(run_notices(records)),
        "command": "\n".join(commands_of(records, results.root)),
        "mlflow.source.git.commit": _once(record.commit for record in records),
        **_made_with(),
    }
    return {name: text[:MAX_TEXT] for name, text in tags.items() if text}


def _once(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(filter(None, texts)))


@cache
def _made_with() -> dict[str, str]:
    tags = {"mlflow.source.name": COMMAND, "mlflow.source.type": "LOCAL"}
    # Users of containers may have no name.
    with suppress(OSError, KeyError):
        tags["mlflow.user"] = getpass.getuser()
    return tags


def _parent(
    answer: Answer,
    name: str,
    results: Results,
    files: Sequence[Path],
    draw: DrawStandings | None,
) -> Entry:
    root = str(results.root)
    records = answer.records
    speedups = {clean(f"speedup/{name}"): speedup.mean for name, speedup in answer.overall.items()}
    metrics = {"num_runs": float(len(records)), "num_ok": float(sum(record.status == "ok" for record in records))}
    metrics |= {**speedups, "best_speedup": max(speedups.values())} if speedups else {}
    note = "\n\n".join([" ".join(sentences(answer)), *(f"- {line}" for line in notices(answer.records))])
    shown = digest_of([hashlib.sha256(file.read_bytes()).hexdigest() for file in files])
    tags = {NOTE_TAG: note[:MAX_TEXT], "best_strategy": answer.fastest, BASELINE_TAG: answer.baseline}
    picture = cache(partial(draw, answer)) if draw else None
    page = cache(lambda: report_of(answer, root, standings=picture() if picture else None))
    artifacts: dict[str, Callable[[], bytes]] = {
        ANSWER_PAGE: lambda: html(page()).encode(),
        "answer.md": lambda: markdown(page()).encode(),
        "answer.json": lambda: report_json(answer, root).encode(),
        **({"iteration_time.png": picture} if picture else {}),
        **{f"figures/{file.name}": file.read_bytes for file in files},
    }
    return Entry(
        SWEEP,
        name[:MAX_NAME],
        failed=False,
        tags={key: text for key, text in tags.items() if text} | _made_with() | {"entrain_bench.shown": shown},
        metrics={key: {0: value} for key, value in metrics.items()},
        artifacts=artifacts,
        table=partial(table_of, records),
        made_ms=_made_ms(records),
    )


def _made_ms(records: Sequence[Record]) -> list[int]:
    made = [round(1e3 * datetime.fromisoformat(one.made_at).timestamp()) for one in records if one.made_at]
    return [min(made), max(made)] if made else []


@lru_cache(maxsize=256)
def _dataset(workload: str, name: str) -> tuple[str, str, str] | None:
    node = json.loads(workload)
    try:
        check_targets(node, "workload")
        fingerprint = instantiate(node, "workload", "source").fingerprint()
    except UserError:
        return None
    return name[:MAX_NAME], digest_of([workload, fingerprint]), workload


def digest_of(values: object) -> str:
    """Return a short hash of plain values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]


def clean(name: str) -> str:
    """Return a name that MLflow takes for a parameter or a metric."""
    return FORBIDDEN.sub("_", name)[:MAX_KEY]
