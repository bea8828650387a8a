"""The outcome that ranks leave in a folder for the process that started them."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from entrain_bench.program.layout_json import layout_from_json, layout_to_json
from entrain_bench.records.outcome import Outcome


def write_outcome(work: Path, outcome: Outcome) -> None:
    """Leave an outcome for the process that started the ranks."""
    if outcome.timeline is not None:
        outcome.timeline.to_parquet(work / "timeline.parquet", index=False)
    values = {name: getattr(outcome, name) for name in ("metrics", "iterations", "execution", "remarks")}
    (work / "outcome.json").write_text(json.dumps(values | {"layout": layout_to_json(outcome.layout)}))


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
