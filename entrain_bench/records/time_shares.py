"""Where an iteration's GPU time goes: every second of every rank in one class, so that all classes are 100 %.

docs/metrics.md defines the classes; ``where_time_goes`` draws them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from entrain_bench.arrays import FloatArray, rows_of
from entrain_bench.costs.bound import stages_held
from entrain_bench.costs.sharding import collective_passes
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program import Pass, Program
from entrain_bench.program.timeline import Timeline
from entrain_bench.simulate import place_actions

TIME_SHARES = (
    "time_work_share",
    "time_kernels_share",
    "time_recompute_share",
    "time_comm_share",
    "time_stages_share",
    "time_replicas_share",
    "time_microbatches_share",
    "time_pipeline_share",
    "time_step_share",
    "time_unused_share",
)


def time_shares(timeline: Timeline, num_ranks: int, least_gpu_s: float, remade: FloatArray) -> dict[str, float]:
    """Shares of the GPU time of an iteration, by ``TIME_SHARES``; none is negative, and together they are 1.

    A rank is occupied by its passes and by what it waits for transfers alone, between the first start and the last end
    of any pass; all before and after is the step. What ranks lack of the most occupied one is split in two: stages
    whose ranks have less than those of another on average, and a rank that has more than the average of the fullest
    stage. The rest is what the most occupied rank itself waits: as long as it would if all microbatches were alike
    (``even_waiting_s``), and beyond that.

    Args:
        timeline: what was executed.
        num_ranks: of the cluster, unused ones included.
        least_gpu_s: GPU time that the samples need at least (``costs.bound.least_gpu_s``); of more than there is
            computation all of that counts as work.
        remade: share of the computation of each action that runs a forward once more ``[actions]``.
    """
    program, width = timeline.program, timeline.program.layout.lane_width
    begin_s = float(timeline.start_s[program.is_pass].min())
    core_s = float(timeline.end_s[program.is_pass].max()) - begin_s
    kinds_s = _occupied_s(timeline, remade)
    # A lane's clock is that of several ranks where they were measured: its actions then may overlap.
    kinds_s *= np.minimum(core_s / np.maximum(kinds_s.sum(axis=0), core_s), 1.0)
    occupied = np.minimum(kinds_s.sum(axis=0), core_s)
    compute, again, comm, synced = (kinds_s * width).sum(axis=1).tolist()
    stage_s, stage_ranks = _class_means(program, occupied)
    fullest, busiest, used = float(stage_s.max()), float(occupied.max()), program.layout.num_ranks
    work, waiting_s = min(least_gpu_s, compute), core_s - busiest
    pipeline_s = min(even_waiting_s(timeline), waiting_s)
    total_s = timeline.iteration_time_s
    gpu_s = (
        work,
        compute - work,
        again,
        comm,
        float(((fullest - stage_s) * stage_ranks).sum()),
        max(busiest - fullest, 0.0) * used,
        (waiting_s - pipeline_s) * used,
        pipeline_s * used,
        (total_s - core_s) * used + synced,
        (num_ranks - used) * total_s,
    )
    return {name: seconds / (num_ranks * total_s) for name, seconds in zip(TIME_SHARES, gpu_s, strict=True)}


def remade_share(truth: CostTruth, program: Program) -> FloatArray:
    """Share of every action's computation that is recomputation ``[actions]``; only backwards have any."""
    share = np.zeros(program.num_actions)
    for index, (module, placed) in enumerate(zip(program.model.modules, program.layout.modules, strict=True)):
        remade = program.remade[index] if program.remade else None
        if not placed.recompute and (remade is None or not remade.any()):
            continue
        split = program.splits_backward(index)
        chunks = program.shapes, program.chunks[index]
        with_s = truth.chunk_times(module, placed, *chunks, remade, split).backward_s
        without_s = truth.chunk_times(module, replace(placed, recompute=False), *chunks, None, split).backward_s
        once_more = np.divide(with_s - without_s, with_s, out=np.zeros_like(with_s), where=with_s > without_s)
        share[program.backward_actions(index)] = once_more
    return share


def even_waiting_s(timeline: Timeline) -> float:
    """What the most occupied rank would wait if all passes of one kind on a replica's stage took the same time.

    The program is placed again, with the mean of the seconds that they took and transfers that take none: every rank
    computes as long as it did, but what it waits for comes in even steps.
    """
    program, passes = timeline.program, timeline.program.is_pass
    seconds = np.where(passes, timeline.end_s - timeline.start_s, 0.0)
    kind = np.zeros(program.num_actions, np.int64)
    for column in (program.module, program.stage, program.replica, program.kind):
        kind = kind * (1 + int(column.max())) + column
    kind = np.where(passes, kind, 0)
    count = np.bincount(kind[passes])
    mean_s = np.bincount(kind[passes], weights=seconds[passes]) / np.maximum(count, 1)
    even_s = np.where(passes, mean_s[kind], 0.0)
    together = collective_passes(program)
    start_s, end_s, _ = place_actions(program, even_s, np.zeros(len(program.dep_actions)), together=together)
    own_s = np.bincount(rows_of(program.lane_offsets), weights=even_s[program.lane_actions])
    return max(float(end_s[passes].max() - start_s[passes].min() - own_s.max()), 0.0)


def _occupied_s(timeline: Timeline, remade: FloatArray) -> FloatArray:
    """What occupies a rank of every lane between the first and the last pass of any, in seconds ``[4, lanes]``.

    Computation, that of recomputation, communication, and synchronisation of gradients after the lane's last pass.
    """
    program, lanes = timeline.program, timeline.program.layout.num_lanes
    lane, action = rows_of(program.lane_offsets), program.lane_actions
    passes = program.is_pass[action]
    own, mine = action[passes], lane[passes]
    start_s, end_s = timeline.start_s[own], timeline.end_s[own]
    begin_s, last_s = float(start_s.min()), float(end_s.max())
    before_s = np.where(np.diff(mine, prepend=-1) == 0, np.append(begin_s, end_s[:-1]), begin_s)
    # What a first pass waits for its weights before any other has begun is of the step.
    waited_s = np.minimum(timeline.transfer_wait_s[own], np.maximum(start_s - before_s, 0.0))
    busy_s = end_s - start_s
    inside_s = np.clip(timeline.comm_s[own], 0.0, busy_s)
    computed_s = busy_s - inside_s
    again_s = remade[own] * computed_s
    free_s = np.full(lanes, begin_s)
    np.maximum.at(free_s, mine, end_s)
    syncs = program.kind[action] == Pass.GRAD_SYNC
    theirs, sync = lane[syncs], action[syncs]
    shown_s = np.minimum(timeline.end_s[sync], last_s) - np.maximum(timeline.start_s[sync], free_s[theirs])
    parts = (
        (mine, computed_s - again_s),
        (mine, again_s),
        (mine, inside_s + waited_s),
        (theirs, np.maximum(shown_s, 0)),
    )
    return np.stack([np.bincount(at, weights=seconds, minlength=lanes) for at, seconds in parts])


def _class_means(program: Program, seconds: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Mean over the ranks that hold the same stages, and how many they are ``[classes]``."""
    _, number = np.unique(stages_held(program.layout), axis=0, return_inverse=True)
    width = program.layout.lane_width
    ranks = np.bincount(number.ravel(), weights=width)
    return np.bincount(number.ravel(), weights=seconds * width) / ranks, ranks
