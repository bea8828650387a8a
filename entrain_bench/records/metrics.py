"""Metrics of a timeline; docs/metrics.md states each by formula."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from entrain_bench.base.arrays import FloatArray, IntArray, offsets_from_counts, rows_of
from entrain_bench.base.hosttime import HostTime
from entrain_bench.costs.bound import Need, find_need
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program.layout import ModuleLayout
from entrain_bench.program.table import parent_microbatches
from entrain_bench.program.timeline import Timeline
from entrain_bench.records.time_shares import remade_share, time_shares

# What the strategy believed of the same program: not of the timeline, so ``measure`` does not return it.
BELIEVED = "believed_time_s"


def microbatch_forward(timeline: Timeline, modules: Sequence[int]) -> tuple[IntArray, FloatArray]:
    """Forward time of every microbatch of the given modules together, summed over stages and parts.

    Sub-microbatches of an encoder count as the microbatch that they are parts of (``parent_microbatches``). A
    microbatch that only has LLM work counts as zero for modules that share the LLM's replicas. If groups have several
    widths, every rank of a stage counts as a replica, with the microbatches of all its groups.

    Returns:
        Replica of each microbatch and its seconds, by replica and microbatch ``[microbatches]``.
    """
    program = timeline.program
    llm = timeline.program.model.llm_index
    duration_s = timeline.end_s - timeline.start_s
    placed = program.layout.modules
    grouped = any(len(placed[index].widths) > 1 for index in (*modules, llm))

    def by_replica(index: int, microbatch: IntArray, seconds: FloatArray) -> tuple[IntArray, IntArray, FloatArray]:
        if not grouped:
            return program.chunks[index].replica, microbatch, seconds
        rows, place = _on_ranks(placed[index], program.chunks[index].replica)
        return place, microbatch[rows], seconds[rows]

    own = [
        by_replica(index, parent_microbatches(program, index), duration_s[program.forward_actions(index)].sum(axis=1))
        for index in modules
    ]
    sizes = [each.plane.shape[1] if grouped else each.copies for each in placed]
    if all(sizes[index] == sizes[llm] for index in modules):
        lacking = program.chunks[llm]
        own.append(by_replica(llm, lacking.microbatch, np.zeros(len(lacking))))
    replica, microbatch, seconds = (np.concatenate(column) for column in zip(*own, strict=True))
    places, place = np.unique(np.stack([replica, microbatch]), axis=1, return_inverse=True)
    return places[0], np.bincount(place.ravel(), weights=seconds, minlength=places.shape[1])


def _on_ranks(placed: ModuleLayout, replica: IntArray) -> tuple[IntArray, IntArray]:
    """Return every chunk once for each rank of its group, and the rank's place on its stage, counted from 0."""
    size = np.array([tp * cp for tp, cp in placed.degrees])[placed.degree_of_copy]
    first = np.concatenate([np.arange(count) for count in placed.num_groups]) * size
    offsets = offsets_from_counts(size[replica])
    rows = rows_of(offsets)
    return rows, first[replica][rows] + np.arange(len(rows)) - offsets[rows]


def forward_std_ms(timeline: Timeline, modules: Sequence[int]) -> float:
    """Standard deviation of the forward time over a replica's microbatches, averaged over replicas, milliseconds."""
    replica, forward_s = microbatch_forward(timeline, modules)
    count = np.bincount(replica)
    if not len(count):
        return 0.0
    each = np.maximum(count, 1)
    apart = forward_s - (np.bincount(replica, weights=forward_s) / each)[replica]
    std = np.sqrt(np.bincount(replica, weights=apart * apart) / each)
    return float(std[count > 0].mean()) * 1e3


def rank_seconds(timeline: Timeline, seconds: FloatArray) -> float:
    """Sum over ranks of a per-action quantity: each action counts for every rank it occupies."""
    program = timeline.program
    width = program.layout.lane_width[rows_of(program.lane_offsets)]
    return float((seconds[program.lane_actions] * width).sum())


def measure(
    timeline: Timeline, truth: CostTruth, host_time: HostTime | None = None, need: Need | None = None
) -> dict[str, float]:
    """Return the metrics of one iteration, by the column names of ``results/table.csv``.

    Args:
        timeline: the executed iteration.
        truth: the cost model.
        host_time: seconds of assigning and scheduling; None: left out.
        need: what the samples need under any layout; None: computed here.
    """
    program = timeline.program
    cluster = truth.cluster
    host_time = host_time or HostTime()
    encoders = [index for index, module in enumerate(truth.model.modules) if module.is_encoder]
    seconds = timeline.iteration_time_s
    passes = program.is_pass
    need = find_need(truth, program.shapes) if need is None else need
    flops_per_s = need.flops / seconds / cluster.num_ranks
    split = any(program.splits_backward(index) for index in range(len(program.chunks)))
    bound_s = need.lower_bound_s(truth, program.layout, program.shapes, split)
    busy_s = rank_seconds(timeline, timeline.end_s - timeline.start_s)
    exposed_s = rank_seconds(timeline, timeline.comm_s + timeline.transfer_wait_s)
    return {
        "iteration_time_s": seconds,
        "core_time_s": float(timeline.end_s[passes].max() - timeline.start_s[passes].min()),
        "samples_per_s": len(program.shapes) / seconds,
        "tokens_per_s": float(program.shapes.llm_tokens.sum()) / seconds,
        "tflops_per_gpu": flops_per_s / 1e12,
        "mfu": flops_per_s / cluster.device.peak_bf16_flops,
        "bubble_ratio": 1.0 - busy_s / (cluster.num_ranks * seconds),
        "encoder_forward_std_ms": forward_std_ms(timeline, encoders) if encoders else 0.0,
        "llm_forward_std_ms": forward_std_ms(timeline, [truth.model.llm_index]),
        "peak_memory_bytes": float(timeline.peak_memory_bytes.max()),
        "exposed_comm_s": exposed_s / cluster.num_ranks,
        "assignment_time_s": host_time.total_s,
        "assignment_exposed_s": host_time.exposed_s(seconds),
        "lower_bound_s": bound_s,
        "gap_to_lower_bound": seconds / bound_s - 1.0,
        "cluster_bound_s": need.bound_s,
        **time_shares(timeline, cluster.num_ranks, need.gpu_s, remade_share(truth, program)),
    }
