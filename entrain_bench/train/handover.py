"""What the process that starts ranks and its ranks leave each other in a folder: configuration, outcome, failures."""

from __future__ import annotations

import json
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from entrain_bench.config.schema import RunConfig
from entrain_bench.errors import DeadlockError, ExecutionError, IncompatibleError, OutOfMemoryError, UserError
from entrain_bench.files import write_atomically
from entrain_bench.records.outcome import Outcome
from entrain_bench.specs.job import LayoutRequest
from entrain_bench.train.wire import layout_from_json, layout_to_json

# A crash prints a stack of every thread, and the names of all extension modules.
OUTPUT_CHARS = 20_000
# Errors that say everything in their line; others are of the rank they happened on.
_KNOWN = {
    kind.__name__: kind for kind in (UserError, IncompatibleError, DeadlockError, OutOfMemoryError, ExecutionError)
}


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception that ended a rank.

    Attributes:
        rank: the rank.
        time_s: when, seconds since the epoch.
        kind: name of the exception's class; empty if it was none of this package's.
        text: one line.
        trace: the traceback.
    """

    rank: int
    time_s: float
    kind: str
    text: str
    trace: str

    def as_error(self) -> Exception:
        """The exception for whoever started the ranks."""
        error = _KNOWN[self.kind](self.text) if self.kind else ExecutionError(f"rank {self.rank}: {self.text}")
        error.__cause__ = ExecutionError(f"traceback of rank {self.rank}:\n{self.trace}")
        return error


def write_failure(work: Path, rank: int, error: Exception) -> None:
    """Leave the exception that ends this rank."""
    kind = type(error).__name__ if type(error) in _KNOWN.values() else ""
    line = " ".join(str(error).split())
    text = line if kind else f"{type(error).__name__}: {line}"
    values = {"rank": rank, "time_s": time.time(), "kind": kind, "text": text, "trace": traceback.format_exc()}
    write_atomically(work / f"failure{rank}.json", json.dumps(values).encode())


def read_failures(work: Path) -> list[Failure]:
    """What ranks left before they ended, in the order of time."""
    failures = [Failure(**json.loads(path.read_text())) for path in work.glob("failure*.json")]
    return sorted(failures, key=lambda failure: failure.time_s)


def output_path(work: Path, rank: int) -> Path:
    """Where a rank's standard output and error go."""
    return work / f"output{rank}.log"


def read_output(work: Path, rank: int) -> str:
    """The end of what a rank has printed."""
    path = output_path(work, rank)
    return path.read_text(errors="replace")[-OUTPUT_CHARS:] if path.exists() else ""


def config_to_json(config: RunConfig) -> str:
    """A run's configuration for the ranks."""
    return json.dumps(config.content() | {"results_dir": config.results_dir, "mlflow": config.mlflow})


def config_from_json(text: str) -> RunConfig:
    """The configuration that ``config_to_json`` wrote."""
    values = json.loads(text)
    return RunConfig(**{**values, "layout": LayoutRequest(**values["layout"])})


def write_outcome(work: Path, outcome: Outcome) -> None:
    """Leave an outcome for the process that started the ranks."""
    if outcome.timeline is not None:
        outcome.timeline.to_parquet(work / "timeline.parquet", index=False)
    values = {
        "layout": layout_to_json(outcome.layout),
        "metrics": dict(outcome.metrics),
        "iterations": [dict(row) for row in outcome.iterations],
    }
    (work / "outcome.json").write_text(json.dumps(values))


def read_outcome(work: Path) -> Outcome:
    """The outcome that rank 0 left."""
    values = json.loads((work / "outcome.json").read_text())
    timeline = work / "timeline.parquet"
    return Outcome(
        layout_from_json(values["layout"]),
        values["metrics"],
        tuple(values["iterations"]),
        pd.read_parquet(timeline) if timeline.exists() else None,
    )
