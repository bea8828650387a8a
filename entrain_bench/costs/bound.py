"""A lower bound on the iteration time that no assignment and no order of actions can beat under a given layout."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from entrain_bench.base.arrays import BoolArray, FloatArray, IntArray, offsets_from_counts, rows_of
from entrain_bench.costs.layer_times import PassTimes, Stages, placed_stages
from entrain_bench.costs.steps import ExposedStep
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.specs.job import divisors
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.shapes import SampleShapes


@dataclass(frozen=True, slots=True)
class Need:
    """GPU time, iteration time and FLOPs that samples need under any layout."""

    gpu_s: float  # ``least_gpu_s``
    bound_s: float  # ``cluster_bound_s``
    flops: float  # model FLOPs of an iteration
    _bounds: dict[tuple[object, bool], float] = field(init=False, default_factory=dict, repr=False, compare=False)

    def lower_bound_s(self, truth: CostTruth, layout: Layout, shapes: SampleShapes, split: bool) -> float:
        """Return ``lower_bound_s`` for these samples, cached: many strategies choose the same layout."""
        key = layout.content, split
        if key not in self._bounds:
            self._bounds[key] = lower_bound_s(truth, layout, shapes, split)
        return self._bounds[key]


def find_need(truth: CostTruth, shapes: SampleShapes) -> Need:
    """GPU time, iteration time and FLOPs that samples need under any layout."""
    gpu_s = least_gpu_s(truth, shapes)
    return Need(gpu_s, cluster_bound_s(truth, shapes, gpu_s), truth.model.training_flops(shapes))


def lower_bound_s(truth: CostTruth, layout: Layout, shapes: SampleShapes, split: bool = False) -> float:
    """Return the larger of two bounds on the iteration time in seconds, ignoring transfers.

    1. Work, for every class of lanes: the time until work can reach it (fill) or its weights are gathered, its share
       of the total work, the time of the way back (drain), and the step.
    2. Critical path: the gather of a first stage's weights; the heaviest sample alone, forward and backward through all
       stages and, between them, its slowest item through its generator; and the step.
    """
    steps = []
    alone = []
    for module, placed in zip(truth.model.modules, layout.modules, strict=True):
        steps.append(_ends(truth, module, placed))
        alone.append(truth.unit_times(module, placed, module.lengths(shapes, module.units(shapes)), split))
    first_gather = min(float(step.gather_s[0]) for step in steps)
    first_step = min(float(step.sync_s[0] + step.optimizer_s[0]) for step in steps)
    ways = _sample_paths(truth, shapes, alone)
    turn = np.zeros(len(shapes))
    first_generator = truth.model.llm_index + 1
    for module, times in zip(truth.model.generators, alone[first_generator:], strict=True):
        there_and_back_s = times.total_s if times.weight_s is None else times.total_s - times.weight_s
        np.maximum.at(turn, module.owners(shapes, module.units(shapes)), there_and_back_s.sum(axis=1))
    critical = first_gather + float((ways[0][-1] + turn + ways[1][-1]).max()) + first_step
    paths = _paths(truth, layout, shapes, alone, *ways)
    return max(critical, _work_bound(truth, layout, shapes, steps, first_step, split, paths))


def _ends(truth: CostTruth, module: ModuleSpec, placed: ModuleLayout) -> ExposedStep:
    """Return exposed seconds of a module's step; the optimizer gathers weights that no forward waits for."""
    exposed = truth.step_costs.exposed(module, placed)
    if truth.framework.overlap_param_gather:
        return exposed
    return ExposedStep(np.zeros(placed.pp), exposed.sync_s, exposed.optimizer_s + exposed.gather_s)


def _sample_paths(truth: CostTruth, shapes: SampleShapes, alone: Sequence[PassTimes]) -> tuple[FloatArray, FloatArray]:
    """Seconds from a sample's first action until it leaves each LLM stage, and back ``[llm stages + 1, samples]``."""
    times = alone[truth.model.llm_index]
    num_stages = times.forward_s.shape[1]
    forward = np.zeros((num_stages + 1, len(shapes)))
    backward = np.zeros((num_stages + 1, len(shapes)))
    for module, encoder_times in zip(truth.model.encoders, alone, strict=False):
        owner = shapes.item_sample[module.units(shapes)]
        np.maximum.at(forward[0], owner, encoder_times.ahead_s.sum(axis=1))
        np.maximum.at(backward[0], owner, encoder_times.back_s.sum(axis=1))
    forward[1:] = times.ahead_s.T
    backward[1:] = times.back_s.T
    return forward.cumsum(axis=0), backward.cumsum(axis=0)


def _paths(
    truth: CostTruth,
    layout: Layout,
    shapes: SampleShapes,
    alone: Sequence[PassTimes],
    forward: FloatArray,
    backward: FloatArray,
) -> list[tuple[FloatArray, FloatArray]]:
    """Return fill and drain of modules ``[stages]``: least times before and after stages over units, else infinity."""
    paths = []
    for module, placed, times in zip(truth.model.modules, layout.modules, alone, strict=True):
        units = module.units(shapes)
        if not module.per_item:
            paths.append((forward[:-1].min(axis=1), backward[:-1].min(axis=1)))
            continue
        ends = []
        for stages_s, llm_s in ((times.ahead_s, forward[-1]), (times.back_s, backward[-1])):
            before = np.zeros((len(units), placed.pp))
            before[:, 1:] = stages_s.cumsum(axis=1)[:, :-1]
            if not module.is_encoder:
                # An item reaches a generator through all of the LLM, and goes back the same way.
                before += llm_s[module.owners(shapes, units), None]
            ends.append(before.min(axis=0, initial=np.inf))
        paths.append((ends[0], ends[1]))
    return paths


def _work_bound(
    truth: CostTruth,
    layout: Layout,
    shapes: SampleShapes,
    steps: Sequence[ExposedStep],
    first_step: float,
    split: bool,
    paths: Sequence[tuple[FloatArray, FloatArray]],
) -> float:
    held = stages_held(layout)
    heavy = []
    work = []
    first = 0
    for module, placed in zip(truth.model.modules, layout.modules, strict=True):
        share, heaviest = _busiest_replica_s(truth, module, placed, module.lengths(shapes, module.units(shapes)))
        work.append(share)
        heavy.append(np.pad(heaviest, ((0, 0), (first, held.shape[1] - first - placed.pp))))
        first += placed.pp
    work_s = np.concatenate(work)
    heavy_s = np.concatenate(heavy)
    fill_s, drain_s = (np.concatenate(parts) for parts in zip(*paths, strict=True))
    sync_s = np.concatenate([step.sync_s for step in steps])
    optimizer_s = np.concatenate([step.optimizer_s for step in steps])
    fill_s = np.maximum(fill_s, np.concatenate([step.gather_s for step in steps]))
    classes, lane_class = np.unique(held, axis=0, return_inverse=True)
    best = 0.0
    for index, stages in enumerate(classes):
        # Works and steps add up only if the class holds every replica of its stages; else each stage bounds separately.
        inside = held[lane_class.ravel() == index].sum(axis=0)[stages]
        complete = np.array_equal(inside, held.sum(axis=0)[stages])
        for group in [np.flatnonzero(stages)] if complete else np.flatnonzero(stages)[:, None]:
            # The stages of one module are as busy as its heaviest units make them, in the same replica.
            total = max(float(work_s[group].sum()), float(heavy_s[:, group].sum(axis=1).max(initial=0.0)))
            # Other work of the lane hides every synchronization except the last.
            synced = float(sync_s[group].min() if truth.framework.overlap_grad_reduce else sync_s[group].sum())
            after = synced + float(optimizer_s[group].sum())
            if not split:
                after = max(after, float(drain_s[group].min()) + first_step)
            if total > 0:
                best = max(best, float(fill_s[group].min()) + total + after)
    return best


def stages_held(layout: Layout) -> BoolArray:
    """Return whether the ranks of a lane hold a stage ``[lanes, stages]``; stages of all modules, in module order."""
    first_stage = np.cumsum([0, *(module.pp for module in layout.modules)])
    held = np.zeros((layout.num_lanes, first_stage[-1]), bool)
    for first, blocks in zip(first_stage[:-1], layout.blocks, strict=True):
        held[blocks.lanes, first + rows_of(blocks.offsets) % blocks.num_stages] = True
    return held


def _busiest_replica_s(
    truth: CostTruth, module: ModuleSpec, placed: ModuleLayout, lengths: IntArray
) -> tuple[FloatArray, FloatArray]:
    """Return least work of the busiest replica: an even share ``[stages]``, its heaviest units ``[sets, stages]``."""
    nothing = np.zeros((0, placed.pp))
    if not len(lengths):
        return np.zeros(placed.pp), nothing
    longest = np.sort(lengths)[::-1]
    placed = placed.as_replicas
    stages = placed_stages(module, placed)
    if placed.widths:
        # Every rank may take part in every unit.
        loads = truth.layer_times.loads(module, longest, np.array([0, len(longest)]))
        return truth.layer_times.gpu_s(module, loads, stages.counts)[0] / placed.plane.shape[1], nothing
    packs = [longest]
    count = 1
    while count * placed.dp < len(longest):
        packs.append(longest[count * placed.dp - count : count * placed.dp + 1])
        count *= 2
    if placed.expert_span > 1:
        # Replicas share the work of experts, so no units weigh on one of them alone.
        packs = packs[:1]
    offsets = offsets_from_counts(np.array([len(pack) for pack in packs]))
    loads = truth.layer_times.loads(module, np.concatenate(packs), offsets)
    total_s = truth.layer_times.work_s(module, loads, stages)
    return total_s[0] / placed.dp, total_s[1:]


def least_gpu_s(truth: CostTruth, shapes: SampleShapes) -> float:
    """Return the minimum GPU time of all work over all packings and layouts, in seconds (``LayerTimes.gpu_s``)."""
    work = 0.0
    for module in truth.model.modules:
        units = module.units(shapes)
        if len(units):
            loads = truth.layer_times.loads(module, module.lengths(shapes, units), np.array([0, len(units)]))
            counts = module.kind_counts([len(module.layers)])
            work += float(truth.layer_times.gpu_s(module, loads, counts)[0, 0])
    return work


def cluster_bound_s(truth: CostTruth, shapes: SampleShapes, work: float) -> float:
    """A bound on the iteration time under any layout: ``work`` over all GPUs, or the longest sample at its widest."""
    modules = truth.model.modules
    ranks = truth.cluster.num_ranks
    longest = int(np.argmax(shapes.llm_tokens))
    node = truth.cluster.gpus_per_node
    # Usually one GPU needs less time than this.
    for widths in [(1, 1)], [(tp, cp) for tp in divisors(node) for cp in divisors(ranks // tp)]:
        widest = [_widest_s(truth, module, shapes, longest, widths) for module in modules]
        path = sum(max(widest[index] for index in group) for group in truth.model.module_groups)
        if path <= work / ranks:
            break
    return max(work / ranks, path)


def _widest_s(
    truth: CostTruth, module: ModuleSpec, shapes: SampleShapes, sample: int, widths: Sequence[tuple[int, int]]
) -> float:
    units = module.units(shapes)
    mine = units[module.owners(shapes, units) == sample]
    if not len(mine):
        return 0.0
    longest = mine[[int(np.argmax(module.lengths(shapes, mine)))]]
    loads = truth.layer_times.loads(module, module.lengths(shapes, longest))
    counts = module.kind_counts([len(module.layers)])
    known = [Stages(counts, tp, cp) for tp, cp in widths if truth.layer_times.knows(module, tp)]
    return min((float(truth.layer_times.work_s(module, loads, stages).sum()) for stages in known), default=inf)
