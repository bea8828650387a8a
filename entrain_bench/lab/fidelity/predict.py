"""Predictions of programs, and their errors: passes emulated on cores of this machine, its links as measured."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.queues import Queue
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd

from entrain_bench.base.arrays import FloatArray
from entrain_bench.costs.truth import CostTruth
from entrain_bench.lab.fidelity.programs import HALVES, FidelityProgram
from entrain_bench.lab.measuring import read_json, write_json
from entrain_bench.program import Program
from entrain_bench.program.timeline import Timeline
from entrain_bench.records.metrics import rank_seconds
from entrain_bench.run.experiment import prepare
from entrain_bench.simulate.executor import make_timeline, place_program
from entrain_bench.specs.cluster import ClusterSpec, LinkTier
from entrain_bench.train.emulate import Emulator, Key, LaneOrder, lane_orders
from entrain_bench.train.launching import pin

# Turns of the programs of a group, and repetitions in each.
TURNS = 4
REPETITIONS = 2


def predict_group(
    programs: Sequence[FidelityProgram], links: Mapping[str, float], cores: Sequence[int], folder: Path
) -> None:
    """Leave ``<folder>/<key>.emulated.json`` of every program, all of the same number of ranks.

    Every rank has a process that measures its passes, pinned like it: what a pass finds in the caches depends on who
    else runs. Programs take turns, as in training: first as fast as passes go, then with the waits that follow. Only
    the latter count.
    """
    if not programs:
        return
    found: dict[str, list[dict[Key, float]]] = {one.key: [] for one in programs}
    waits: dict[str, Timeline] = {}
    num_ranks = programs[0].num_ranks
    context = get_context("spawn")
    free: Queue[int] = context.Queue()
    for core in cores[:num_ranks]:
        free.put(core)
    with ProcessPoolExecutor(num_ranks, context, _take_core, (free,)) as pool:
        for turn in range(1 + TURNS):
            for one in programs if turn % 2 else programs[::-1]:
                # All ranks at the same time, with the waits of the timeline before.
                lanes = lane_orders(one.program, waits.get(one.key))
                tasks = [pool.submit(_measured, one, links, lane) for lane in lanes for _ in range(lane.num_ranks)]
                own = [task.result() for task in tasks]
                if turn:
                    own = found[one.key] = found[one.key] + own
                emulator = _emulator(one, links, mean_of(own))
                prices = emulator.price(one.program)
                memory = emulator.truth.memory.over_program(one.program)
                timeline = make_timeline(one.program, prices, memory)
                waits[one.key] = timeline
                if turn == TURNS:
                    values = {
                        "work_s": (prices.duration_s - prices.comm_s).tolist(),
                        "start_s": timeline.start_s.tolist(),
                        "end_s": timeline.end_s.tolist(),
                        "peak_bytes": float(timeline.peak_memory_bytes.max()),
                    }
                    write_json(folder / f"{one.key}.emulated.json", values, None)


def mean_of(several: Sequence[Mapping[Key, float]]) -> dict[Key, float]:
    """Merge the measurements of several processes: the mean of each pass and optimizer step."""
    seconds = defaultdict[Key, list[float]](list)
    for own in several:
        for key, took_s in own.items():
            seconds[key].append(took_s)
    return {key: fmean(took_s) for key, took_s in seconds.items()}


def _measured(one: FidelityProgram, links: Mapping[str, float], lane: LaneOrder) -> dict[Key, float]:
    """Run the passes of a lane in this process."""
    emulator = _emulator(one, links, {})
    emulator.measure(one.program, [lane])
    return emulator.measured_s


def _emulator(one: FidelityProgram, links: Mapping[str, float], measured_s: dict[Key, float]) -> Emulator:
    job = prepare(one.config).job
    truth = CostTruth(job.model, joined_by(job.cluster, links), job.framework)
    return Emulator(truth, float("inf"), "cpu", "float32", num_repetitions=REPETITIONS, measured_s=measured_s)


def joined_by(cluster: ClusterSpec, links: Mapping[str, float]) -> ClusterSpec:
    """The cluster with one tier of links, as measured."""
    return replace(cluster, tiers=(LinkTier("gloo", cluster.num_ranks, **links),))


def _take_core(free: Queue[int]) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    pin([free.get()], 0)


def program_row(
    where: Mapping[str, Any], layout: str, measured_s: float, predicted_s: float, repetitions_s: Sequence[float]
) -> dict[str, Any]:
    """The columns that every comparison of a trained program with its prediction has; ``where`` comes first."""
    repetitions = json.dumps([round(each, 5) for each in repetitions_s])
    times = {"measured_s": measured_s, "predicted_s": predicted_s, "iteration_error": predicted_s / measured_s - 1.0}
    return {**where, "layout": layout, **times, "repetitions_s": repetitions}


def all_rows(programs: Sequence[FidelityProgram], folder: Path) -> pd.DataFrame:
    """Return one row per program whose files exist; times are medians. Columns: docs/fidelity.md."""
    links = read_json(folder / "links.json")
    rows = []
    for each in programs:
        *halves, emulated = (read_json(folder / f"{each.key}.{what}.json") for what in (*HALVES, "emulated"))
        if emulated and all(halves):
            rows.append({"prediction": "emulated", **_row(each, links, halves, emulated)})
    return pd.DataFrame(rows)


def _row(
    one: FidelityProgram, links: dict[str, float], halves: Sequence[dict[str, Any]], predicted: dict[str, Any]
) -> dict[str, Any]:
    program = one.program
    starts, ends, cpu = (np.concatenate([own[name] for own in halves]) for name in ("start_s", "end_s", "cpu_s"))
    start = np.array(predicted["start_s"])
    end = np.array(predicted["end_s"])
    passes = program.is_pass
    iteration_s = ends.max(axis=1)
    before_s, after_s = (float(np.median(np.max(own["end_s"], axis=1))) for own in halves)
    cpu_s = np.median(cpu, axis=0)[passes]
    peak_bytes = max(own["peak_bytes"] for own in halves)
    error = np.array(predicted["work_s"])[passes] / cpu_s - 1.0
    low, middle, high = np.percentile(iteration_s, [25, 50, 75])
    cores_s = ends[:, passes].max(axis=1) - starts[:, passes].min(axis=1)
    prices = _emulator(one, links, {}).truth.price(program)
    replayed_s = []
    for took_s in ends - starts:
        own = place_program(program, replace(prices, duration_s=np.where(passes, took_s, 0.0)))
        replayed_s.append(float(own[1][passes].max() - own[0][passes].min()))
    bubbles = [_bubble(program, began, ended) for began, ended in zip(starts, ends, strict=True)]
    where = {name: getattr(one, name) for name in ("num_ranks", "workload", "seed", "strategy")}
    layout = "; ".join(f"{name} {text}" for name, text in program.layout.describe().items())
    return program_row(where, layout, float(middle), float(end.max()), iteration_s.tolist()) | {
        "num_actions": program.num_actions,
        "noise": float((high - low) / 2 / middle),
        "core_error": float((end[passes].max() - start[passes].min()) / np.median(cores_s) - 1.0),
        "replay_error": float(np.median(replayed_s / cores_s - 1.0)),
        "action_error": float(np.median(np.abs(error))),
        "action_bias": float(np.median(error)),
        "measured_bubble": float(np.median(bubbles)),
        "predicted_bubble": _bubble(program, start, end),
        "repeat_error": after_s / before_s - 1.0,
        "measured_bytes": peak_bytes,
        "predicted_bytes": predicted["peak_bytes"],
        "memory_error": predicted["peak_bytes"] / peak_bytes - 1.0,
    }


def _bubble(program: Program, start: FloatArray, end: FloatArray) -> float:
    passes = program.is_pass
    nothing = np.zeros(program.num_actions)
    lanes = np.zeros(program.layout.num_lanes)
    timeline = Timeline(program, start, end, nothing, nothing, lanes)
    busy_s = rank_seconds(timeline, np.where(passes, end - start, 0.0))
    return float(1.0 - busy_s / (program.layout.num_ranks * (end[passes].max() - start[passes].min())))
