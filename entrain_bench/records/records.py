"""Run records: one file per run, written completely or not at all, and named by its key.

Planned runs of sweeps are in ``sweeps/<key>.json``, so that a lost record is noticed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from entrain_bench.base.errors import UnwritableError, UserError
from entrain_bench.base.files import remove_partial, write_atomically
from entrain_bench.base.hosttime import host_name
from entrain_bench.config.schema import ASIDE, GROUP_KEYS, ConfigSchema, RunConfig
from entrain_bench.program.layout import ModuleLayout
from entrain_bench.program.table import chrome_trace
from entrain_bench.records.cells import Cell
from entrain_bench.records.code import made_by, metrics_version
from entrain_bench.records.keys import workload_of
from entrain_bench.records.leaves import parameters_text, setting_text
from entrain_bench.records.metrics import FAILED, KNOWN, SUITE, RunResult, check_results
from entrain_bench.records.sealed import log_warning, say_nothing, sealed, unsealed
from entrain_bench.records.time_shares import EXPERT_SHARES
from entrain_bench.specs.workload import Counts

if TYPE_CHECKING:
    import pandas as pd

# Processes that a run may take with it before sweeps leave it alone.
MAX_DEATHS = 2
# Characters of a key that name its subfolder: 256 of them keep folders of many runs small.
SHARD = 2
# Errors of reading a file that is no record, or that cannot be read.
BAD = (AttributeError, ValueError, KeyError, TypeError, OSError, RecursionError)
STATUSES = ("ok", "skipped", "failed")
# Folder of planned sweeps, and letters of their keys.
SWEEPS = "sweeps"
SWEEP_LETTERS = 16
LABELS = ("strategy", "workload", "model", "cluster", "harness", "seed")
# Columns of metrics.
METRICS = tuple(one.name for one in SUITE)
# Wall times of the machine.
MEASURED = tuple(one.name for one in SUITE if one.wall_time)
# Plain keys of a run, in the order of the columns.
SETTINGS = tuple(
    key for key in ConfigSchema.__dataclass_fields__ if key not in {*GROUP_KEYS, *ASIDE, "seed", "layout", "figure"}
)
# Settings with a column only in tables of runs of which one has another value than this.
RARE: Mapping[str, Any] = {
    "padding": "none",
    "pad_to_multiple_of": 8,
    "precision": "bf16",
    "adapter": {"rank": 0, "targets": ["all-linear"]},
}
DEGREES = ("layout_tp", "layout_cp", "layout_pp", "layout_dp")
# Only in rows of runs that request another value than this.
REQUESTS: Mapping[str, Any] = {"layout_ep": None, "layout_sharding": None, "layout_recompute_rule": "any"}
RECOMPUTE = "layout_recompute"
PARTS = ("planner", "assigner", "scheduler")
PARAMETERS = (*PARTS, "strategy_parameters", "workload_parameters")


@dataclass(frozen=True)
class Record:
    """One run, stored in ``runs/<first two characters of its key>/<key>.json``.

    Attributes:
        key: hash of configuration, data and code.
        status: ``ok``, ``skipped`` or ``failed``; ``reason``: why a run has no result.
        labels, config: the run's labels in tables, and its resolved configuration.
        host: machine of planning and assignment times; empty in older records.
        layout, degrees: short text, and ``tp``, ``cp``, ``pp`` and ``dp``, of each module.
        sharding: value of ``layout.sharding`` in use, ``none`` if ranks share out nothing; several with ``+``.
        metrics, iterations: means over iterations, and metrics of every one.
        samples, execution, remarks: as in ``RunResult``.
        settled: whether configuration, data and code determine a failure, so that another attempt fails, too.
        deaths: how many times in a row the process that ran it died.
        timeline: whether its timeline was kept; None if no output needed it, False if there was none to keep.
        timeline_sha256: hash of the timeline's file; empty if none was kept.
        overrides, config_dir: as given; together they repeat the run.
        versions, commit, made_at: of Python and decisive libraries; of the suite (``+changes``: not as committed); UTC.
        metrics_version: hash of the code that computed the metrics, which is not in the key.
    """

    key: str
    status: str
    reason: str
    labels: Mapping[str, Any]
    config: Mapping[str, Any]
    code_version: str
    host: str = ""
    layout: Mapping[str, str] = field(default_factory=dict)
    degrees: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    sharding: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    iterations: tuple[Mapping[str, float], ...] = ()
    samples: Counts = field(default_factory=dict)
    settled: bool = False
    deaths: int = 0
    timeline: bool | None = False
    timeline_sha256: str = ""
    execution: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    config_dir: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    commit: str = ""
    made_at: str = ""
    metrics_version: str = ""

    @property
    def finished(self) -> bool:
        """Whether the run has a result or failure that another attempt would not change."""
        return self.status in ("ok", "skipped") or self.settled

    def is_left_alone(self, retry_failed: bool) -> bool:
        """Whether a sweep skips the run; it retries other failures, because their cause may lie outside."""
        if self.status == "failed" and retry_failed:
            return False
        return self.finished or self.deaths >= MAX_DEATHS

    @property
    def computed(self) -> tuple[Any, ...]:
        """The result without wall times; a second simulation of the same run gives equal values."""
        each = (self.metrics, *self.iterations)
        metrics = [{name: value for name, value in one.items() if name not in MEASURED} for one in each]
        return self.status, dict(self.layout), metrics

    @property
    def added(self) -> list[str]:
        """Names of the metrics that the user's folder added, sorted."""
        return sorted(self.metrics.keys() - KNOWN)

    def _shows(self, setting: str) -> bool:
        """Whether the run needs a setting's column."""
        return setting not in RARE or self.config.get(setting, RARE[setting]) != RARE[setting]

    @cached_property
    def row(self) -> Mapping[str, Any]:
        """The run's row of ``table.csv``; empty where the run is older than a setting."""
        layout = self.config["layout"]
        degrees = {name: layout[name.removeprefix("layout_")] for name in DEGREES}
        requests = {name: layout.get(name.removeprefix("layout_"), usual) for name, usual in REQUESTS.items()}
        recompute = layout.get("recompute")
        return {
            **{name: self.labels[name] for name in LABELS},
            "status": self.status,
            "reason": self.reason,
            **{name: self.metrics.get(name) for name in (*METRICS, *self.added)},
            **{name: self.metrics[name] for name in EXPERT_SHARES if name in self.metrics},
            **{name: setting_text(self.config.get(name)) for name in SETTINGS if self._shows(name)},
            **degrees,
            **{name: value for name, value in requests.items() if value != REQUESTS[name]},
            RECOMPUTE: None if recompute is None else "+".join(recompute) or "none",
            "layout": "; ".join(f"{name} {text}" for name, text in sorted(self.layout.items())),
            "sharding": self.sharding or None,
            **{part: self.labels[part] for part in PARTS},
            "strategy_parameters": parameters_text(self.config["strategy"]),
            "workload_parameters": parameters_text(self.config["workload"]),
            "host": self.host,
            "code_version": self.code_version,
            "key": self.key,
        }


def _sharding(placed: ModuleLayout, config: RunConfig) -> str:
    shares = placed.scatters or config.framework.distributed_optimizer
    return placed.sharding if shares else "none"


def new_record(
    cell: Cell,
    status: str,
    reason: str = "",
    outcome: RunResult | None = None,
    settled: bool = False,
    deaths: int = 0,
) -> Record:
    """The record of a finished, skipped or failed run."""
    result: dict[str, Any] = {}
    if outcome:
        chosen = {"microbatches": str(outcome.layout.num_microbatches)} if cell.config.microbatch_size is None else {}
        if outcome.layout.options:
            chosen["options"] = " ".join(outcome.layout.options)
        result = {
            "layout": outcome.layout.describe() | chosen,
            "degrees": {m.module: {"tp": m.tp, "cp": m.cp, "pp": m.pp, "dp": m.dp} for m in outcome.layout.modules},
            "sharding": "+".join(dict.fromkeys(_sharding(placed, cell.config) for placed in outcome.layout.modules)),
            "metrics": dict(outcome.metrics),
            "iterations": outcome.iterations,
            "samples": outcome.samples,
            "execution": dict(outcome.execution),
            "remarks": outcome.remarks,
            "timeline": outcome.timeline is not None or (False if cell.timeline else None),
        }
    result |= {"settled": settled, "deaths": deaths, "overrides": cell.overrides, "config_dir": cell.config_dir}
    made = {"host": host_name(), "metrics_version": metrics_version(), **made_by()}
    return Record(
        cell.key, status, reason, labels_of(cell.config), cell.config.content(), cell.code_version, **made, **result
    )


def record_of(cell: Cell, outcome: RunResult) -> Record:
    """The record of a run that came to its end; one with failed iterations counts as failed, and keeps its metrics."""
    failed = round(outcome.metrics.get(FAILED, 0.0) * cell.config.iterations)
    if not failed:
        return new_record(cell, "ok", outcome=outcome)
    reason = f"memory: {failed} of {cell.config.iterations} iterations need more than a rank has (on_oom=count)"
    return new_record(cell, "failed", reason, outcome, settled=True)


def labels_of(config: RunConfig) -> dict[str, Any]:
    """Return the labels of a run in tables: names of its groups, its seed, and classes of its strategy's parts."""
    targets = {part: str(config.strategy[part].get("_target_", "")) for part in PARTS}
    return {
        "strategy": str(config.strategy["name"]),
        "workload": workload_of(config).name,
        "model": str(config.model["name"]),
        "cluster": str(config.cluster["name"]),
        "harness": str(config.harness["label"]),
        "seed": config.seed,
        **{part: target.rpartition(".")[2] for part, target in targets.items()},
    }


@dataclass(frozen=True)
class Results:
    """The results folder: runs, timelines, and the tables of all runs (results/README.md).

    A record is read once, and again if its file changes. One that was changed (``sealed``), or has impossible numbers,
    counts as absent, and so does a timeline that is not that of its record; ``warn`` is told of each once.
    """

    root: Path
    warn: Callable[[Path, str], None] = field(default=log_warning, repr=False, compare=False)
    _named: set[Path] = field(default_factory=set, init=False, repr=False, compare=False)
    # By key: size and time of change of the file that was read, a hash of its bytes, and the record.
    _records: dict[str, tuple[tuple[int, int], str, Record]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __reduce__(self) -> tuple[type[Results], tuple[Path, Callable[[Path, str], None]]]:
        """Copy without cache and warnings: worker processes read few records, and their parent has warned."""
        return Results, (self.root, say_nothing)

    def prepare(self) -> None:
        """Raise ``UserError`` if the folder cannot be made or written to; remove partial files of killed runs."""
        nearest = next(folder for folder in (self.root.absolute(), *self.root.absolute().parents) if folder.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            raise UserError(f"results_dir={self.root}: must be a writable folder, but {nearest} is not")
        remove_partial(self.root)

    def record_path(self, key: str) -> Path:
        """Where the record of a key is."""
        return self._place("runs", f"{key}.json")

    def timeline_path(self, key: str) -> Path:
        """Where the timeline table of a key is."""
        return self._place("timelines", f"{key}.parquet")

    def trace_path(self, key: str) -> Path:
        """Where the Chrome trace of a key is."""
        return self._place("timelines", f"{key}.json")

    def _place(self, folder: str, name: str) -> Path:
        return self.root / folder / name[:SHARD] / name

    def read(self, key: str) -> Record | None:
        """Return the record of a key; None if there is no valid one."""
        try:
            # A path object would take ten times as long, for every cell of a sweep.
            status = os.stat(f"{self.root}/runs/{key[:SHARD]}/{key}.json")  # noqa: PTH116
            seen = (status.st_size, status.st_mtime_ns)
            known = self._records.get(key)
            if known is None or known[0] != seen:
                content = self.record_path(key).read_bytes()
                known = seen, sha256(content).hexdigest(), _record_of(unsealed(content, key))
                self._records[key] = known
            return known[2]
        except FileNotFoundError:
            return None
        except BAD as error:
            self._name(self.record_path(key), error, "the run counts as not run")
            return None

    def _name(self, path: Path, error: Exception, consequence: str) -> None:
        if path not in self._named:
            self._named.add(path)
            self.warn(path, f"not used ({' '.join(str(error).split())}); {consequence}")

    def digest(self, key: str) -> str:
        """Hash of the record of a key; empty if there is none."""
        return self._records[key][1] if self.read(key) else ""

    def keys(self) -> list[str]:
        """Keys of all record files, sorted."""
        return sorted(path.stem for path in (self.root / "runs").glob("*/*.json"))

    def kept(self, cell: Cell, retry_failed: bool = False) -> Record | None:
        """Return the record that replaces a cell's run, with its timeline if needed; None: the cell must run."""
        record = self.read(cell.key)
        if record is None or not record.is_left_alone(retry_failed):
            return None
        lacks_timeline = cell.timeline and record.status == "ok" and not self.has_timeline(record)
        return None if lacks_timeline else record

    def has_timeline(self, record: Record) -> bool:
        """Return whether the timeline of a record is unchanged; also true if there was none to keep."""
        return record.timeline is False or self._timeline_bytes(record) is not None

    def timeline(self, record: Record) -> pd.DataFrame | None:
        """Return the timeline of a record (``timeline_frame``); None if there is no valid one."""
        content = self._timeline_bytes(record)
        if content is None:
            return None
        # A run starts before pandas is imported.
        import pandas as pd

        return pd.read_parquet(BytesIO(content))

    def _timeline_bytes(self, record: Record) -> bytes | None:
        path = self.timeline_path(record.key)
        try:
            content = path.read_bytes() if record.timeline else None
            if content is not None and sha256(content).hexdigest() != record.timeline_sha256:
                raise ValueError("it is not that of its run")
            return content
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._name(path, error, "it is made again when it is asked for")
            return None

    def write(self, record: Record, timeline: pd.DataFrame | None) -> Record:
        """Store a run, its timeline first; returns the record with its hash.

        ``UnwritableError`` if the folder cannot be written to.
        """
        try:
            if timeline is not None:
                content = timeline.to_parquet(index=False)
                record = replace(record, timeline=True, timeline_sha256=sha256(content).hexdigest())
                write_atomically(self.timeline_path(record.key), content)
            write_atomically(self.record_path(record.key), sealed(record.key, asdict(record)))
        except OSError as error:
            raise UnwritableError(f"results_dir={self.root}: cannot be written to ({error})") from error
        return record

    def write_trace(self, key: str) -> None:
        """Write the Chrome trace of a key from its timeline, if it has one; ten times as large, so not for sweeps."""
        record = self.read(key)
        timeline = self.timeline(record) if record else None
        if timeline is not None:
            write_atomically(self.trace_path(key), json.dumps(chrome_trace(timeline)).encode())

    def records(self) -> list[Record]:
        """Return all valid records, in the order of tables."""
        return sorted_records(record for key in self.keys() if (record := self.read(key)))


def sorted_records(records: Iterable[Record]) -> list[Record]:
    """Return records in the order of tables: by labels, then by settings, independent of the code version."""

    def place(record: Record) -> list[str]:
        names = (*LABELS, *SETTINGS, *DEGREES, *REQUESTS, RECOMPUTE, *PARAMETERS, "key")
        return [str(record.row.get(name)) for name in names]

    return sorted(records, key=place)


def _record_of(values: dict[str, Any]) -> Record:
    """Raises one of ``BAD`` for values that are no record."""
    listed = {name: tuple(values.get(name, ())) for name in ("iterations", "remarks", "overrides")}
    record = Record(**{**values, **listed})
    if record.status not in STATUSES:
        raise ValueError(f"status={record.status!r} must be one of {', '.join(STATUSES)}")
    if record.status == "ok" or record.metrics.get(FAILED):
        check_results(record.metrics, record.iterations)
    elif record.metrics or record.iterations:
        raise ValueError(f"status={record.status!r} must not have metrics")
    # Whether all that a table shows is there.
    _ = record.row
    return record


@dataclass(frozen=True, slots=True)
class PlannedSweep:
    """A sweep's name, overrides of each cell that it came to by key, and those of cells that it did not come to."""

    name: str
    cells: Mapping[str, str]
    unbegun: Sequence[str] = ()

    def lost(self, results: Results) -> list[str]:
        """Return the overrides of cells without a record."""
        return [text for key, text in self.cells.items() if results.read(key) is None] + [*self.unbegun]

    def write(self, results: Results) -> None:
        """Replace the file of an earlier attempt at the sweep; if writing fails, the cells are not known later."""
        texts = sorted([*self.cells.values(), *self.unbegun])
        key = sha256(json.dumps([self.name, texts]).encode()).hexdigest()[:SWEEP_LETTERS]
        values = {"name": self.name, "cells": self.cells, "unbegun": [*self.unbegun], **made_by()}
        with suppress(OSError):
            write_atomically(results.root / SWEEPS / f"{key}.json", sealed(key, values))


def read_sweeps(results: Results) -> Iterator[tuple[Path, PlannedSweep | None]]:
    """Return the sweeps of a folder by their files; None for an invalid file."""
    for path in sorted((results.root / SWEEPS).glob("*.json")):
        sweep = None
        with suppress(OSError, ValueError, KeyError, TypeError):
            values = unsealed(path.read_bytes(), path.stem)
            sweep = PlannedSweep(str(values["name"]), {**values["cells"]}, [*values["unbegun"]])
        yield path, sweep


def lost_runs(results: Results, shown: Collection[str]) -> list[str]:
    """Runs without a record of the sweeps that runs with these keys are of, by their overrides."""
    sweeps = [sweep for _, sweep in read_sweeps(results) if sweep and not sweep.cells.keys().isdisjoint(shown)]
    return [*dict.fromkeys(text for sweep in sweeps for text in sweep.lost(results))]
