"""Errors of predictions: of times, bubbles and memory of programs, and of what strategies gain over each other."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from entrain_bench.base.arrays import FloatArray
from entrain_bench.lab.fidelity.cases import Case
from entrain_bench.lab.fidelity.predict import replayed_s
from entrain_bench.program import Program
from entrain_bench.program.timeline import Timeline
from entrain_bench.records.metrics import rank_seconds

TARGET_ITERATION, TARGET_SPEEDUP = 0.10, 0.05


def case_rows(
    cases: Sequence[Case], folder: Path, simulate: Callable[[Case], dict[str, Any]] | None = None
) -> pd.DataFrame:
    """One row a case whose files are there, and a second one if it is also simulated; times are medians.

    ``noise`` is half the interquartile range of the measured iteration over its median. ``action_error`` is the median
    over passes of the size of the error of their processor seconds, ``action_bias`` that of the error; on a machine
    with nothing else to do they are those of the time. ``replay_error`` is that of the time from the first pass to the
    end of the last (``core_error``) when passes take as long as they did: what order and messages leave unexplained.
    A bubble is the share of that time in which a rank runs no pass.
    """
    links = json.loads((folder / "links.json").read_text())
    rows = []
    for case in cases:
        if found := _read(case, folder):
            measured, emulated = found
            rows.append({"prediction": "emulated", **_row(case, links, measured, emulated)})
            if simulate is not None:
                rows.append({"prediction": "simulated", **_row(case, links, measured, simulate(case))})
    return pd.DataFrame(rows)


def _read(case: Case, folder: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    files = [folder / f"{case.key}.json", folder / f"{case.key}.emulated.json"]
    if not all(file.exists() for file in files):
        return None
    measured, predicted = (json.loads(file.read_text()) for file in files)
    return measured, predicted


def _row(case: Case, links: dict[str, float], measured: dict[str, Any], predicted: dict[str, Any]) -> dict[str, object]:
    program = case.program
    starts, ends = np.array(measured["start_s"]), np.array(measured["end_s"])
    start, end = np.array(predicted["start_s"]), np.array(predicted["end_s"])
    passes = program.is_pass
    iteration_s = ends.max(axis=1)
    cpu_s = np.median(np.array(measured["cpu_s"]), axis=0)[passes]
    error = np.array(predicted["work_s"])[passes] / cpu_s - 1.0
    low, middle, high = np.percentile(iteration_s, [25, 50, 75])
    cores_s = ends[:, passes].max(axis=1) - starts[:, passes].min(axis=1)
    replayed = [
        replayed_s(case, links, took_s) / core_s - 1.0 for took_s, core_s in zip(ends - starts, cores_s, strict=True)
    ]
    bubbles = [_bubble(program, one, other) for one, other in zip(starts, ends, strict=True)]
    values = {
        "num_ranks": case.num_ranks,
        "workload": case.workload,
        "seed": case.seed,
        "strategy": case.strategy,
        "layout": "; ".join(f"{name} {text}" for name, text in program.layout.describe().items()),
        "num_actions": program.num_actions,
        "measured_s": float(middle),
        "predicted_s": float(end.max()),
        "noise": float((high - low) / 2 / middle),
        "iteration_error": float(end.max() / middle - 1.0),
        "core_error": float((end[passes].max() - start[passes].min()) / np.median(cores_s) - 1.0),
        "replay_error": float(np.median(replayed)),
        "action_error": float(np.median(np.abs(error))),
        "action_bias": float(np.median(error)),
        "measured_bubble": float(np.median(bubbles)),
        "predicted_bubble": _bubble(program, start, end),
        "measured_bytes": measured["peak_bytes"],
        "predicted_bytes": predicted["peak_bytes"],
        "memory_error": predicted["peak_bytes"] / measured["peak_bytes"] - 1.0,
    }
    return values | {"repetitions_s": json.dumps([round(float(each), 5) for each in iteration_s])}


def _bubble(program: Program, start: FloatArray, end: FloatArray) -> float:
    passes = program.is_pass
    nothing, lanes = np.zeros(program.num_actions), np.zeros(program.layout.num_lanes)
    timeline = Timeline(program, start, end, nothing, nothing, lanes)
    busy_s = rank_seconds(timeline, np.where(passes, end - start, 0.0))
    return float(1.0 - busy_s / (program.layout.num_ranks * (end[passes].max() - start[passes].min())))
