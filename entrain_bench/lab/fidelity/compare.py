"""Errors of predictions: of times, bubbles and memory of programs, and of what strategies gain over each other."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from entrain_bench.base.arrays import FloatArray
from entrain_bench.lab.fidelity.predict import replayed_s
from entrain_bench.lab.fidelity.programs import FidelityProgram
from entrain_bench.lab.files import read_json
from entrain_bench.program import Program
from entrain_bench.program.timeline import Timeline
from entrain_bench.records.metrics import rank_seconds

# Targets of median errors.
TARGET_ITERATION, TARGET_SPEEDUP = 0.10, 0.05


def program_row(
    where: Mapping[str, Any], layout: str, measured_s: float, predicted_s: float, repetitions_s: Sequence[float]
) -> dict[str, Any]:
    """The columns that every comparison of a trained program with its prediction has; ``where`` comes first."""
    repetitions = json.dumps([round(each, 5) for each in repetitions_s])
    times = {"measured_s": measured_s, "predicted_s": predicted_s, "iteration_error": predicted_s / measured_s - 1.0}
    return {**where, "layout": layout, **times, "repetitions_s": repetitions}


def accuracy(rows: pd.DataFrame, pairs: pd.DataFrame) -> dict[str, tuple[float, float]]:
    """Median size of the error and its target, of iterations and of speedups (``pair_rows``), where there are any."""
    found = {}
    if len(rows):
        found["iterations"] = float(rows["iteration_error"].abs().median()), TARGET_ITERATION
    if len(pairs):
        found["speedups"] = float(pairs["error"].abs().median()), TARGET_SPEEDUP
    return found


def all_rows(
    programs: Sequence[FidelityProgram],
    folder: Path,
    simulate: Callable[[FidelityProgram], dict[str, Any]] | None = None,
) -> pd.DataFrame:
    """Return one row per program whose files exist, and a second one if it is also simulated; times are medians.

    ``noise`` is half the interquartile range of the measured iteration over its median. ``action_error`` is the median
    over passes of the size of the error of their processor seconds, ``action_bias`` that of the error; on a machine
    with nothing else to do they are those of the time. ``replay_error`` is that of the time from the first pass to the
    end of the last (``core_error``) when passes take as long as they did: what order and messages leave unexplained.
    A bubble is the share of that time in which a rank runs no pass.
    """
    links = read_json(folder / "links.json")
    rows = []
    for each in programs:
        measured, emulated = (read_json(folder / f"{each.key}{suffix}.json") for suffix in ("", ".emulated"))
        if measured and emulated:
            rows.append({"prediction": "emulated", **_row(each, links, measured, emulated)})
            if simulate is not None:
                rows.append({"prediction": "simulated", **_row(each, links, measured, simulate(each))})
    return pd.DataFrame(rows)


def _row(
    one: FidelityProgram, links: dict[str, float], measured: dict[str, Any], predicted: dict[str, Any]
) -> dict[str, Any]:
    program = one.program
    starts, ends = np.array(measured["start_s"]), np.array(measured["end_s"])
    start, end = np.array(predicted["start_s"]), np.array(predicted["end_s"])
    passes = program.is_pass
    iteration_s = ends.max(axis=1)
    cpu_s = np.median(np.array(measured["cpu_s"]), axis=0)[passes]
    error = np.array(predicted["work_s"])[passes] / cpu_s - 1.0
    low, middle, high = np.percentile(iteration_s, [25, 50, 75])
    cores_s = ends[:, passes].max(axis=1) - starts[:, passes].min(axis=1)
    replayed = [replayed_s(one, links, took_s) for took_s in ends - starts] / cores_s - 1.0
    bubbles = [_bubble(program, began, ended) for began, ended in zip(starts, ends, strict=True)]
    where = {name: getattr(one, name) for name in ("num_ranks", "workload", "seed", "strategy")}
    layout = "; ".join(f"{name} {text}" for name, text in program.layout.describe().items())
    return program_row(where, layout, float(middle), float(end.max()), iteration_s.tolist()) | {
        "num_actions": program.num_actions,
        "noise": float((high - low) / 2 / middle),
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


def _bubble(program: Program, start: FloatArray, end: FloatArray) -> float:
    passes = program.is_pass
    nothing, lanes = np.zeros(program.num_actions), np.zeros(program.layout.num_lanes)
    timeline = Timeline(program, start, end, nothing, nothing, lanes)
    busy_s = rank_seconds(timeline, np.where(passes, end - start, 0.0))
    return float(1.0 - busy_s / (program.layout.num_ranks * (end[passes].max() - start[passes].min())))
