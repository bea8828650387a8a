"""What a program asks of a device: stages, passes of chunks on them, and their order on a lane."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np

from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.program import Program
from entrain_bench.program.layout import ModuleLayout
from entrain_bench.program.timeline import Timeline
from entrain_bench.specs.model import ModuleSpec


@dataclass(frozen=True, slots=True)
class StageShape:
    """A stage of a module as one of its ranks holds it, by kind of each layer; stages with the same kinds are equal."""

    module: str
    kinds: tuple[int, ...]
    tp: int
    cp: int
    dp: int
    recompute: bool
    widths: tuple[tuple[int, int], ...]
    layers: range = field(compare=False)


@dataclass(frozen=True, slots=True)
class StageWork:
    """The passes of a chunk on a stage; ``lengths`` are tokens of each packed sequence.

    ``outputs`` (LLM tokens of items) are of an encoder's last stage, ``num_projected`` tokens of the LLM's first stage,
    ``labelled`` tokens by sample of its last, if its head tells them apart. The first ``remade`` blocks are recomputed.
    """

    stage: StageShape
    lengths: tuple[int, ...]
    outputs: tuple[int, ...] = ()
    num_projected: int = 0
    splits_backward: bool = False
    labelled: tuple[int, ...] = ()
    remade: int = 0
    degree: int = 0


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """Seconds of a forward, a backward, and a weight pass if there is one."""

    forward_s: float
    backward_s: float
    weight_s: float = 0.0


def stage_shapes(module: ModuleSpec, placed: ModuleLayout) -> list[StageShape]:
    """The stages of a module under a layout, in order."""
    how = placed.tp, placed.cp, placed.dp, placed.recompute, placed.widths
    kinds = tuple(module.layer_kind.tolist())
    ends = [0, *accumulate(placed.layers_per_stage)]
    return [StageShape(module.name, kinds[first:last], *how, range(first, last)) for first, last in pairwise(ends)]


@dataclass(frozen=True, slots=True)
class LaneOrder:
    """The passes of a lane, the idle seconds before each, and the ranks that run them together."""

    actions: IntArray
    waits_s: FloatArray
    first_rank: int
    num_ranks: int


def lane_orders(program: Program, timeline: Timeline | None = None) -> list[LaneOrder]:
    """The passes of every lane that has any, with the waits of a timeline of the program, or none."""
    orders = []
    lanes = np.split(program.lane_actions, program.lane_offsets[1:-1])
    widths = zip(program.layout.lane_first_rank.tolist(), program.layout.lane_width.tolist(), strict=True)
    for actions, ranks in zip(lanes, widths, strict=True):
        passes = actions[program.is_pass[actions]]
        if not len(passes):
            continue
        waits_s = np.zeros(len(passes))
        if timeline is not None:
            before_s = np.concatenate([[0.0], timeline.end_s[passes[:-1]]])
            waits_s = np.maximum(timeline.start_s[passes] - before_s, 0.0)
        orders.append(LaneOrder(passes, waits_s, *ranks))
    return orders


def works_of(program: Program) -> dict[int, StageWork]:
    """The work that every pass belongs to, by action."""
    works = dict[int, StageWork]()
    shapes = program.shapes
    for index, (module, chunks) in enumerate(zip(program.model.modules, program.chunks, strict=True)):
        placed = program.layout.modules[index]
        splits = program.splits_backward(index)
        stages = stage_shapes(module, placed)
        degrees = placed.degree_of_copy[chunks.replica].tolist()
        remade = program.remade[index].tolist() if program.remade else [[0] * placed.pp] * len(chunks)
        passes = [program.forward_actions(index), program.backward_actions(index)]
        passes += [program.weight_actions(index)] if splits else []
        for chunk in range(len(chunks)):
            members = chunks.units(chunk)
            lengths = tuple(module.lengths(shapes, members).tolist())
            outputs = tuple(shapes.item_llm_tokens[members].tolist()) if module.is_encoder else ()
            told = module.labelled(shapes, members)
            labelled = () if told is None else tuple(told.tolist())
            projected = 0 if module.is_encoder else int((shapes.llm_tokens - shapes.text_tokens)[members].sum())
            for place, stage in enumerate(stages):
                is_last = place == len(stages) - 1
                how = (remade[chunk][place], degrees[chunk])
                ends = (outputs, labelled) if is_last else ((), ())
                work = StageWork(stage, lengths, ends[0], 0 if place else projected, splits, ends[1], *how)
                works |= {int(actions[chunk, place]): work for actions in passes}
    return works
