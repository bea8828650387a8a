"""What the process that starts ranks hands over to them, and the outcome that they hand back in a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from entrain_bench.config.schema import ASIDE, RunConfig
from entrain_bench.program.layout_json import layout_from_json, layout_to_json
from entrain_bench.records.outcome import Outcome


def config_to_json(config: RunConfig) -> str:
    """A run's configuration for the ranks."""
    return json.dumps(config.content() | {name: getattr(config, name) for name in ASIDE})


def config_from_json(text: str) -> RunConfig:
    """The configuration that ``config_to_json`` wrote."""
    return RunConfig.from_values(json.loads(text))


def write_outcome(work: Path, outcome: Outcome) -> None:
    """Leave an outcome for the process that started the ranks."""
    if outcome.timeline is not None:
        outcome.timeline.to_parquet(work / "timeline.parquet", index=False)
    values = {
        "layout": layout_to_json(outcome.layout),
        "metrics": dict(outcome.metrics),
        "iterations": [dict(row) for row in outcome.iterations],
        "execution": dict(outcome.execution),
        "remarks": list(outcome.remarks),
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
        execution=values["execution"],
        remarks=tuple(values["remarks"]),
    )
