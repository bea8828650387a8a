"""What tells one measurement from another: the layers of a stage on a rank, and the lengths packed into a chunk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.program import Program
from entrain_bench.program.layout import ModuleLayout
from entrain_bench.program.timeline import Timeline
from entrain_bench.specs.model import ModuleSpec


@dataclass(frozen=True, slots=True)
class StageShape:
    """A stage of a module as one of its ranks holds it; middle stages with the same kinds of layers are one.

    Attributes:
        module: its name.
        kinds: kind of each layer, as an index into the module's.
        tp: tensor-parallel degree.
        cp: context-parallel degree.
        dp: replicas, over which optimizer states may be sharded.
        recompute: whether backward runs each block's forward once more.
        layers: a stage with these kinds.
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
    """The passes of a chunk on a stage.

    Attributes:
        stage: the stage.
        lengths: tokens of each packed sequence.
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
    """What a forward and a backward took, and a weight pass if there is one."""

    forward_s: float
    backward_s: float
    weight_s: float = 0.0


def stage_shapes(module: ModuleSpec, placed: ModuleLayout) -> list[StageShape]:
    """The stages of a module under a layout, in order."""
    shapes, first = [], 0
    for count in placed.layers_per_stage:
        layers = range(first, first + count)
        kinds = tuple(module.layer_kind[first : first + count].tolist())
        shapes.append(StageShape(module.name, kinds, placed.tp, placed.cp, placed.dp, placed.recompute, layers))
        first += count
    return shapes


@dataclass(frozen=True, slots=True)
class LaneOrder:
    """The passes of a lane.

    ``waits_s`` are idle seconds before each.
    """

    actions: IntArray
    waits_s: FloatArray


def lane_orders(program: Program, timeline: Timeline | None = None) -> list[LaneOrder]:
    """The passes of every lane that has any, with the waits of a timeline of the program, or none."""
    orders = []
    for actions in np.split(program.lane_actions, program.lane_offsets[1:-1]):
        passes = actions[program.is_pass[actions]]
        waits_s = np.zeros(len(passes))
        if timeline is not None and len(passes):
            before_s = np.concatenate([[0.0], timeline.end_s[passes[:-1]]])
            waits_s = np.maximum(timeline.start_s[passes] - before_s, 0.0)
        if len(passes):
            orders.append(LaneOrder(passes, waits_s))
    return orders


def stages_in(program: Program, order: IntArray) -> list[tuple[int, int]]:
    """Module and stage of everything that actions run, each once, sorted."""
    return sorted(set(zip(program.module[order].tolist(), program.stage[order].tolist(), strict=True)))


def works_of(program: Program) -> list[dict[tuple[int, int], StageWork]]:
    """The work of every chunk on every stage, by both, one mapping a module."""
    return [dict(_works(program, module)) for module in range(len(program.model.modules))]


def _works(program: Program, index: int) -> Iterator[tuple[tuple[int, int], StageWork]]:
    module, chunks, shapes = program.model.modules[index], program.chunks[index], program.shapes
    stages, splits = stage_shapes(module, program.layout.modules[index]), program.splits_backward(index)
    for chunk in range(len(chunks)):
        members = chunks.members[chunks.offsets[chunk] : chunks.offsets[chunk + 1]]
        lengths = tuple(module.lengths(shapes, members).tolist())
        outputs = tuple(shapes.item_llm_tokens[members].tolist()) if module.is_encoder else ()
        projected = 0 if module.is_encoder else int((shapes.llm_tokens - shapes.text_tokens)[members].sum())
        for place, stage in enumerate(stages):
            last = place == len(stages) - 1
            yield (chunk, place), StageWork(stage, lengths, outputs if last else (), 0 if place else projected, splits)
