"""Metrics of an iteration out of what all ranks saw, and of a run out of those of its iterations."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import numpy as np
import torch

from entrain_bench.base.hosttime import HostTime
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program import Program
from entrain_bench.program.timeline import Timeline
from entrain_bench.records.metrics import measure
from entrain_bench.records.time_shares import TIME_SHARES
from entrain_bench.specs.cluster import ClusterSpec
from entrain_bench.train.device import dtype_name
from entrain_bench.train.measuring.alignment import on_one_clock
from entrain_bench.train.measuring.losses import total_loss
from entrain_bench.train.measuring.merge import merge_timeline
from entrain_bench.train.measuring.seen import Seen

# What follows from constants of the cluster's GPUs.
OF_THE_CLUSTER = ("mfu", "lower_bound_s", "gap_to_lower_bound", "cluster_bound_s", *TIME_SHARES)


def why_not_of_the_cluster(device: torch.device, dtype: torch.dtype, cluster: ClusterSpec) -> str:
    """Why a run cannot be held against the cluster's constants; empty if it can."""
    if device.type == "cpu":
        return "ranks compute on a CPU, of which the cluster's constants say nothing"
    if (ran := dtype_name(dtype)) != (peak := cluster.device.peak_dtype):
        return f"it ran in {ran}, and the peak of {cluster.device.name} is of {peak}"
    return ""


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
