"""Keys of measurements: the layers of a stage on a rank, and the lengths packed into a chunk."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.program import Program
from entrain_bench.program.layout import ModuleLayout
from entrain_bench.program.timeline import Timeline
from entrain_bench.specs.model import ModuleSpec


@dataclass(frozen=True, slots=True)
class StageShape:
    """A stage of a module as one of its ranks holds it; stages with the same kinds of layers are equal.

    ``kinds`` are indices into the module's kinds, by layer.
    """

    module: str
    kinds: tuple[int, ...]
    tp: int
    cp: int
    dp: int
    recompute: bool
    layers: range = field(compare=False)


@dataclass(frozen=True, slots=True)
class StageWork:
    """The passes of a chunk on a stage; lengths in tokens.

    Attributes:
        outputs: LLM tokens that each item is projected to, on the last stage of an encoder.
        num_projected: tokens that encoders hand over, on the first stage of an LLM.
        splits_backward: whether gradients of weights have a pass of their own.
    """

    stage: StageShape
    lengths: tuple[int, ...]
    outputs: tuple[int, ...] = ()
    num_projected: int = 0
    splits_backward: bool = False


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """Seconds of a forward, a backward, and a weight pass if there is one."""

    forward_s: float
    backward_s: float
    weight_s: float = 0.0


def stage_shapes(module: ModuleSpec, placed: ModuleLayout) -> list[StageShape]:
    """The stages of a module under a layout, in order."""
    shapes = []
    for last, count in zip(accumulate(placed.layers_per_stage), placed.layers_per_stage, strict=True):
        kinds = tuple(module.layer_kind[last - count : last].tolist())
        how = placed.tp, placed.cp, placed.dp, placed.recompute
        shapes.append(StageShape(module.name, kinds, *how, layers=range(last - count, last)))
    return shapes


@dataclass(frozen=True, slots=True)
class LaneOrder:
    """The passes of a lane, and the idle seconds before each."""

    actions: IntArray
    waits_s: FloatArray


def lane_orders(program: Program, timeline: Timeline | None = None) -> list[LaneOrder]:
    """The passes of every lane that has any, with the waits of a timeline of the program, or none."""
    orders = []
    for actions in np.split(program.lane_actions, program.lane_offsets[1:-1]):
        passes = actions[program.is_pass[actions]]
        if not len(passes):
            continue
        waits_s = np.zeros(len(passes))
        if timeline is not None:
            before_s = np.concatenate([[0.0], timeline.end_s[passes[:-1]]])
            waits_s = np.maximum(timeline.start_s[passes] - before_s, 0.0)
        orders.append(LaneOrder(passes, waits_s))
    return orders


def stages_in(program: Program, order: IntArray) -> list[tuple[int, int]]:
    """Module and stage of the actions, each once, sorted."""
    return sorted(set(zip(program.module[order].tolist(), program.stage[order].tolist(), strict=True)))


def works_of(program: Program) -> list[dict[tuple[int, int], StageWork]]:
    """The work of every chunk on every stage, by both, one mapping a module."""
    works: list[dict[tuple[int, int], StageWork]] = []
    shapes = program.shapes
    for index, (module, chunks) in enumerate(zip(program.model.modules, program.chunks, strict=True)):
        stages, splits = stage_shapes(module, program.layout.modules[index]), program.splits_backward(index)
        works.append({})
        split = np.split(chunks.members, chunks.offsets[1:-1])
        for chunk, members in zip(range(len(chunks)), split, strict=False):
            lengths = tuple(module.lengths(shapes, members).tolist())
            outputs = tuple(shapes.item_llm_tokens[members].tolist()) if module.is_encoder else ()
            projected = 0 if module.is_encoder else int((shapes.llm_tokens - shapes.text_tokens)[members].sum())
            for place, stage in enumerate(stages):
                ends = outputs if place == len(stages) - 1 else (), 0 if place else projected
                works[-1][chunk, place] = StageWork(stage, lengths, *ends, splits)
    return works
