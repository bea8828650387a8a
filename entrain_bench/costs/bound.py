"""A lower bound on the iteration time that no assignment and no order of actions can beat under a given layout.

All of a stage's work in its best packing, divided by its replicas, bounds the busiest lane from below, and a sample
alone bounds every chunk that holds it, as layer times rise with what they are given (``LayerTimes``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from entrain_bench.arrays import FloatArray, rows_of
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program import Pass
from entrain_bench.program.layout import Layout
from entrain_bench.specs.shapes import SampleShapes


@dataclass(frozen=True, slots=True)
class _Paths:
    """Least times around a module's stages, over all units that could be first or last there ``[stages]``."""

    fill_s: FloatArray
    drain_s: FloatArray


def lower_bound_s(truth: CostTruth, layout: Layout, shapes: SampleShapes) -> float:
    """The larger of two bounds, transfers taken as free.

    1. Work: for every class of lanes, the time until anything can reach it (fill), its share of the total work, and
       what must follow on the way back (drain) and at the step.
    2. Critical path: the heaviest sample alone, forward and backward through all stages and, between them, its slowest
       item through its generator; and the step.
    """
    steps = {
        module.name: truth.step_s(module, placed, Pass.GRAD_SYNC) + truth.step_s(module, placed, Pass.OPTIMIZER)
        for module, placed in zip(truth.model.modules, layout.modules, strict=True)
    }
    first_step = min(float(step[0]) for step in steps.values())
    forward, backward = _sample_paths(truth, layout, shapes)
    turn = np.zeros(len(shapes))
    for module, own in zip(truth.model.generators, layout.modules[truth.model.llm_index + 1 :], strict=True):
        units = module.units(shapes)
        times = truth.unit_times(module, own, module.lengths(shapes, units))
        np.maximum.at(turn, module.owners(shapes, units), times.total_s.sum(axis=1))
    critical = float((forward[-1] + turn + backward[-1]).max()) + first_step
    return max(critical, _work_bound(truth, layout, shapes, steps, first_step))


def _sample_paths(truth: CostTruth, layout: Layout, shapes: SampleShapes) -> tuple[FloatArray, FloatArray]:
    """Seconds from a sample's first action until it leaves each LLM stage, and back ``[llm stages + 1, samples]``.

    Row 0 is the slowest of its items through their encoders, 0 for text alone; items may run side by side.
    """
    llm = truth.model.llm
    placed = layout.modules[truth.model.llm_index]
    forward, backward = np.zeros((placed.pp + 1, len(shapes))), np.zeros((placed.pp + 1, len(shapes)))
    for module, own in zip(truth.model.encoders, layout.modules, strict=False):
        units = module.units(shapes)
        times = truth.unit_times(module, own, module.lengths(shapes, units))
        owner = shapes.item_sample[units]
        np.maximum.at(forward[0], owner, (times.forward_s + times.forward_comm_s).sum(axis=1))
        np.maximum.at(backward[0], owner, (times.backward_s + times.backward_comm_s).sum(axis=1))
    times = truth.unit_times(llm, placed, shapes.llm_tokens)
    forward[1:] = (times.forward_s + times.forward_comm_s).T
    backward[1:] = (times.backward_s + times.backward_comm_s).T
    return forward.cumsum(axis=0), backward.cumsum(axis=0)


def _paths(truth: CostTruth, layout: Layout, shapes: SampleShapes) -> list[_Paths]:
    """Fill and drain of every stage of every module; infinite where a module has no work."""
    paths = []
    forward, backward = _sample_paths(truth, layout, shapes)
    for module, own in zip(truth.model.modules, layout.modules, strict=True):
        units = module.units(shapes)
        if not module.per_item:
            paths.append(_Paths(forward[:-1].min(axis=1), backward[:-1].min(axis=1)))
            continue
        if not len(units):
            paths.append(_Paths(np.full(own.pp, np.inf), np.full(own.pp, np.inf)))
            continue
        times = truth.unit_times(module, own, module.lengths(shapes, units))
        ahead = (times.forward_s + times.forward_comm_s).cumsum(axis=1)
        back = (times.backward_s + times.backward_comm_s).cumsum(axis=1)
        # An item reaches an encoder at once, a generator through all of the LLM, and goes back the same way.
        owner = module.owners(shapes, units)
        first, last = (0.0, 0.0) if module.is_encoder else (forward[-1][owner, None], backward[-1][owner, None])
        fill, drain = (np.insert(way, 0, 0.0, axis=1)[:, :-1] + end for way, end in ((ahead, first), (back, last)))
        paths.append(_Paths(fill.min(axis=0), drain.min(axis=0)))
    return paths


def _work_bound(
    truth: CostTruth, layout: Layout, shapes: SampleShapes, steps: dict[str, FloatArray], first_step: float
) -> float:
    """The work bound over all classes of lanes; a class is the lanes that hold the same stages."""
    work, fill, drain, own_step = [], [], [], []
    for module, placed, path in zip(truth.model.modules, layout.modules, _paths(truth, layout, shapes), strict=True):
        units = module.units(shapes)
        counts, lengths = module.kind_counts(placed.layers_per_stage), module.lengths(shapes, units)
        loads = truth.layer_times.loads(module, lengths, np.array([0, len(units)]))
        seconds = truth.layer_times.work_s(module, loads, counts, placed.tp, placed.cp, placed.recompute)
        work.append(seconds[0] / placed.dp if len(units) else np.zeros(placed.pp))
        fill.append(path.fill_s)
        drain.append(path.drain_s)
        own_step.append(steps[module.name])
    first_stage = np.cumsum([0, *(m.pp for m in layout.modules)])
    held = np.zeros((layout.num_lanes, first_stage[-1]), bool)
    for index, blocks in enumerate(layout.blocks):
        stage = first_stage[index] + rows_of(blocks.offsets) % blocks.num_stages
        held[blocks.lanes, stage] = True
    work_s, fill_s, drain_s, step_s = (np.concatenate(part) for part in (work, fill, drain, own_step))
    classes, lane_class = np.unique(held, axis=0, return_inverse=True)
    best = 0.0
    for index, stages in enumerate(classes):
        # Works and steps add up only if the class holds every replica of each of its stages; else each stage bounds
        # alone, by the busiest of its own replicas.
        inside = held[lane_class.ravel() == index].sum(axis=0)[stages]
        complete = np.array_equal(inside, held.sum(axis=0)[stages])
        for group in [np.flatnonzero(stages)] if complete else np.flatnonzero(stages)[:, None]:
            total = float(work_s[group].sum())
            after = max(float(step_s[group].sum()), float(drain_s[group].min()) + first_step)
            if total > 0:
                best = max(best, float(fill_s[group].min()) + total + after)
    return best
