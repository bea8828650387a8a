"""Where an iteration's GPU time goes: every second of every rank in one class, so that all classes are 100 %.

docs/metrics.md defines the classes; ``where_time_goes`` draws them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from entrain_bench.base.arrays import FloatArray, IntArray, rows_of
from entrain_bench.costs.bound import stages_held
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program import Pass, Program
from entrain_bench.program.timeline import Timeline

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
# Those of a model with experts alone, after the others.
EXPERT_SHARES = ("time_exchange_share", "time_experts_share")


@dataclass(frozen=True, slots=True)
class OfExperts:
    """Time of experts in each action ``[actions]``."""

    exchange_s: FloatArray  # all-to-all of tokens, in seconds of communication
    uneven: FloatArray  # share of the computation that equal loads of experts would save


def time_shares(
    timeline: Timeline, num_ranks: int, least_gpu_s: float, remade: FloatArray, experts: OfExperts | None = None
) -> dict[str, float]:
    """Shares of the GPU time of an iteration, by ``TIME_SHARES``; none is negative, and together they are 1.

    docs/metrics.md defines them. ``num_ranks`` includes unused ones, ``least_gpu_s`` is of ``costs.bound``, and
    ``remade`` is the share of each action's computation that runs a forward once more ``[actions]``. With ``experts``
    there are ``EXPERT_SHARES``, too.
    """
    program = timeline.program
    width = program.layout.lane_width
    begin_s = float(timeline.start_s[program.is_pass].min())
    core_s = float(timeline.end_s[program.is_pass].max()) - begin_s
    kinds_s = _occupied_s(timeline, remade, experts)
    # A lane's clock is that of several ranks where they were measured: its actions then may overlap.
    kinds_s *= np.minimum(core_s / np.maximum(kinds_s.sum(axis=0), core_s), 1.0)
    occupied = np.minimum(kinds_s.sum(axis=0), core_s)
    compute, again, comm, synced, *of_experts = (kinds_s * width).sum(axis=1).tolist()
    stage_s, stage_ranks = _class_means(program, occupied)
    fullest = float(stage_s.max())
    busiest = float(occupied.max())
    used = program.layout.num_ranks
    work = min(least_gpu_s, compute)
    waiting_s = core_s - busiest
    pipeline_s = min(float((occupied + fill_and_drain_s(timeline)).max()) - busiest, waiting_s)
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
        *of_experts,
    )
    names = (*TIME_SHARES, *(EXPERT_SHARES if experts else ()))
    return {name: seconds / (num_ranks * total_s) for name, seconds in zip(names, gpu_s, strict=True)}


def time_of_experts(truth: CostTruth, program: Program) -> OfExperts | None:
    """Compare every action's passes with those of equal loads and of exchanges in no time; None without experts."""
    if not any(layer.num_experts for module in program.model.modules for layer in module.kinds):
        return None
    exchange_s = np.zeros(program.num_actions)
    uneven = np.zeros(program.num_actions)
    silent = replace(truth, exchanges=False)
    for index, (module, placed) in enumerate(zip(program.model.modules, program.layout.modules, strict=True)):
        if placed.ep == 1:
            continue
        remade = program.remade[index] if program.remade else None
        of = program.shapes, program.chunks[index], remade, program.splits_backward(index)
        even_module = replace(module, layers=tuple(layer.balanced() for layer in module.layers))
        real, without = (costs.chunk_times(module, placed, *of) for costs in (truth, silent))
        even = truth.chunk_times(even_module, placed, *of)
        for at, name in (program.forward_actions(index), "forward"), (program.backward_actions(index), "backward"):
            comm_s = getattr(real, f"{name}_comm_s") - getattr(without, f"{name}_comm_s")
            exchange_s[at] = np.maximum(comm_s, 0.0)
            whole_s = getattr(real, f"{name}_s")
            saved_s = whole_s - getattr(even, f"{name}_s")
            uneven[at] = np.divide(saved_s, whole_s, out=np.zeros_like(whole_s), where=saved_s > 0)
    return OfExperts(exchange_s, uneven)


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


def fill_and_drain_s(timeline: Timeline) -> FloatArray:
    """How long a mean chunk of its replica takes to reach the ranks of every lane and to return from them ``[lanes]``.

    It passes the stages before: of its own module, of the LLM for a generator, and of the slowest encoder; of a module
    with another DP their mean over replicas. A rank counts by the stage that is reached first.
    """
    program = timeline.program
    llm = program.model.llm_index
    modules = [_mean_passes_s(timeline, index) for index in range(len(program.chunks))]
    lead_s = np.full(program.layout.num_lanes, np.inf)
    for index, (own_s, blocks) in enumerate(zip(modules, program.layout.blocks, strict=True)):
        before_s = np.zeros(len(own_s))
        for other in modules[: llm if index >= llm else 0]:
            before_s = np.maximum(before_s, _of_replicas(other, len(own_s)))
        if index > llm:
            before_s = before_s + _of_replicas(modules[llm], len(own_s))
        reached_s = before_s[:, None] + np.cumsum(own_s, axis=1) - own_s
        np.minimum.at(lead_s, blocks.lanes, reached_s.ravel()[rows_of(blocks.offsets)])
    return lead_s


def _of_replicas(stages_s: FloatArray, count: int) -> FloatArray:
    """Return sums over the stages of each replica, or of the replicas' mean if another number is given."""
    through_s = stages_s.sum(axis=1)
    return through_s if len(through_s) == count else np.full(count, through_s.mean())


def _mean_passes_s(timeline: Timeline, module: int) -> FloatArray:
    """Mean over a replica's chunks of the time of a forward and a backward on each stage ``[replicas, stages]``."""
    program = timeline.program
    seconds = timeline.end_s - timeline.start_s
    placed = program.layout.modules[module]
    replica = program.chunks[module].replica
    total_s = np.zeros((placed.copies, placed.pp))
    np.add.at(total_s, replica, seconds[program.forward_actions(module)] + seconds[program.backward_actions(module)])
    return np.asarray(total_s / np.maximum(np.bincount(replica, minlength=placed.copies), 1)[:, None])


def _occupied_s(timeline: Timeline, remade: FloatArray, experts: OfExperts | None) -> FloatArray:
    """Return seconds of computation, recomputation, communication, and synchronization after passes ``[kinds, lanes]``.

    With ``experts`` those of their exchange and of their unequal loads follow, and are in no other.
    """
    program = timeline.program
    lanes = program.layout.num_lanes
    lane = rows_of(program.lane_offsets)
    action = program.lane_actions
    passes = program.is_pass[action]
    own = action[passes]
    mine = lane[passes]
    start_s = timeline.start_s[own]
    end_s = timeline.end_s[own]
    begin_s = float(start_s.min())
    last_s = float(end_s.max())
    before_s = np.where(np.diff(mine, prepend=-1) == 0, np.append(begin_s, end_s[:-1]), begin_s)
    # A first pass's wait for its weights, before any other has begun, counts as part of the step.
    waited_s = np.minimum(timeline.transfer_wait_s[own], np.maximum(start_s - before_s, 0.0))
    busy_s = end_s - start_s
    inside_s = np.clip(timeline.comm_s[own], 0.0, busy_s)
    computed_s = busy_s - inside_s
    of_experts: list[tuple[IntArray, FloatArray]] = []
    if experts:
        exchange_s = np.minimum(experts.exchange_s[own], inside_s)
        uneven_s = experts.uneven[own] * computed_s
        inside_s = inside_s - exchange_s
        computed_s = computed_s - uneven_s
        of_experts = [(mine, exchange_s), (mine, uneven_s)]
    again_s = remade[own] * computed_s
    free_s = np.full(lanes, begin_s)
    np.maximum.at(free_s, mine, end_s)
    syncs = program.kind[action] == Pass.GRAD_SYNC
    theirs = lane[syncs]
    sync = action[syncs]
    shown_s = np.minimum(timeline.end_s[sync], last_s) - np.maximum(timeline.start_s[sync], free_s[theirs])
    parts = (
        (mine, computed_s - again_s),
        (mine, again_s),
        (mine, inside_s + waited_s),
        (theirs, np.maximum(shown_s, 0)),
        *of_experts,
    )
    return np.stack([np.bincount(at, weights=seconds, minlength=lanes) for at, seconds in parts])


def _class_means(program: Program, seconds: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Mean over the ranks that hold the same stages, and how many they are ``[classes]``."""
    _, number = np.unique(stages_held(program.layout), axis=0, return_inverse=True)
    width = program.layout.lane_width
    ranks = np.bincount(number.ravel(), weights=width)
    return np.bincount(number.ravel(), weights=seconds * width) / ranks, ranks
