"""Timeline, loss and metrics of an iteration from the measurements of all ranks, and metrics of a run."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import numpy as np
import torch

from entrain_bench.base.arrays import FloatArray, rows_of
from entrain_bench.base.hosttime import HostTime
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program import Pass, Program
from entrain_bench.program.timeline import Timeline
from entrain_bench.records.metrics import measure
from entrain_bench.records.time_shares import TIME_SHARES
from entrain_bench.specs.cluster import ClusterSpec
from entrain_bench.train.device import dtype_name
from entrain_bench.train.measuring.clock import on_one_clock
from entrain_bench.train.measuring.seen import Seen
from entrain_bench.train.messages.places import lane_of_rank, places_of

# What follows from constants of the cluster's GPUs.
OF_THE_CLUSTER = ("mfu", "lower_bound_s", "gap_to_lower_bound", "cluster_bound_s", *TIME_SHARES)


def why_not_of_the_cluster(device: torch.device, dtype: torch.dtype, cluster: ClusterSpec) -> str:
    """Why a run cannot be held against the cluster's constants; empty if it can."""
    if device.type == "cpu":
        return "ranks compute on a CPU, of which the cluster's constants say nothing"
    if (ran := dtype_name(dtype)) != (peak := cluster.device.peak_dtype):
        return f"it ran in {ran}, and the peak of {cluster.device.name} is of {peak}"
    return ""


def total_loss(program: Program, losses: Sequence[Sequence[tuple[int, float]]]) -> float:
    """Mean loss of a predicted token, from action and loss of every chunk, by rank."""
    llm = next(index for index, module in enumerate(program.model.modules) if not module.is_encoder)
    tp, counted = program.layout.modules[llm].tp, list[float]()
    for rank, own in enumerate(losses):
        # Tensor-parallel ranks hold copies, context-parallel ranks parts.
        if all(place.position % tp == 0 for place in places_of(program.layout, rank) if place.module == llm):
            counted += [loss for _, loss in own]
    return float(sum(counted))


def merge_timeline(program: Program, rows: Sequence[FloatArray], peak_bytes: Sequence[float]) -> Timeline:
    """Merge action, start and end of every action of each rank ``[ranks][actions, 3]``.

    An action of several ranks starts when the last of them starts, for they wait for each other inside. Collective
    communication is known separately for gradient synchronisation only. An action waited for a transfer from the moment
    its ranks were free and its inputs computed.
    """
    start, end = np.full((2, program.num_actions), -np.inf)
    for own in rows:
        action = own[:, 0].astype(np.int64)
        np.maximum.at(start, action, own[:, 1])
        np.maximum.at(end, action, own[:, 2])
    comm = np.where(program.kind == Pass.GRAD_SYNC, end - start, 0.0)
    peak = np.zeros(program.layout.num_lanes)
    for rank, need in enumerate(peak_bytes):
        lane_index = lane_of_rank(program.layout, rank)
        if lane_index is not None:
            peak[lane_index] = max(peak[lane_index], need)
    ready = np.zeros(program.num_actions)
    np.maximum.at(ready, rows_of(program.dep_offsets), end[program.dep_actions])
    lane, ordered = rows_of(program.lane_offsets), program.lane_actions
    follows = lane[1:] == lane[:-1]
    np.maximum.at(ready, ordered[1:][follows], end[ordered[:-1][follows]])
    waited = np.where(np.diff(program.dep_offsets) > 0, np.maximum(start - ready, 0.0), 0.0)
    return Timeline(program, start, end, comm, waited, peak)


def metrics_of(
    program: Program, everyone: Sequence[Seen], truth: CostTruth, host_time: HostTime, left_out: Sequence[str] = ()
) -> tuple[dict[str, float], Timeline]:
    """Metrics of an iteration, without those ``left_out``, and its timeline, from the measurements of all ranks."""
    grad_norm, stalls_s = everyone[0].grad_norm, [seen.input_stall_s for seen in everyone]
    rows = on_one_clock([seen.rows for seen in everyone], [seen.began_s for seen in everyone])
    timeline = merge_timeline(program, rows, [seen.peak_bytes for seen in everyone])
    row = {name: value for name, value in measure(timeline, truth, host_time).items() if name not in left_out}
    row |= {
        "loss": total_loss(program, [seen.losses for seen in everyone]),
        "grad_norm": grad_norm,
        "skipped_updates": float(not isfinite(grad_norm)),
        "input_stall_s": max(stalls_s),
        "input_stall_mean_s": float(np.mean(stalls_s)),
    }
    return row, timeline


def mean_metrics(history: list[dict[str, float]]) -> dict[str, float]:
    """Means of finite values over iterations; the first, which warms up, counts only if it is the only one."""
    rows = history[1:] or history
    values = {name: [row[name] for row in rows if isfinite(row[name])] for name in history[0]}
    return {name: float(np.mean(finite)) for name, finite in values.items() if finite}
