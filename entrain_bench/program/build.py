"""From chunks and slots to a program: lane orders by sorting, dependencies by joining sample sets."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from entrain_bench.base.arrays import IntArray, offsets_from_counts, rows_of, take_rows
from entrain_bench.program.assignment import Chunks
from entrain_bench.program.columns import Pass, Program
from entrain_bench.program.layout import Layout
from entrain_bench.specs.layer import BF16_BYTES
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.shapes import SampleShapes


@dataclass(frozen=True, slots=True)
class Slots:
    """When a module's actions run on their lanes: each lane runs its actions by rising slot ``[chunks, stages]``.

    Within a slot forwards come first, in the model's order of modules, then by microbatch and part. Backwards follow,
    in the reverse order of modules, then by microbatch, the part that waited longest first. Weight passes come last, in
    the order of backwards. Two stages of a module on the same ranks never share a slot.
    """

    # Slots ``[chunks, stages]``, non-negative integers.
    forward: IntArray
    backward: IntArray
    weight: IntArray | None = None  # of weight passes; None if backwards are not split

    @property
    def passes(self) -> tuple[IntArray, ...]:
        """The slots of each kind of pass there is, in the order in which actions are numbered."""
        return (self.forward, self.backward) if self.weight is None else (self.forward, self.backward, self.weight)


def build_program(
    model: ModelSpec, layout: Layout, shapes: SampleShapes, chunks: Sequence[Chunks], slots: Sequence[Slots]
) -> Program:
    """Number the actions, order them on their lanes and derive their dependencies."""
    stages = [module.pp for module in layout.modules]
    num_passes = [len(module_slots.passes) for module_slots in slots]
    counts = [kinds * len(rows) * pp for kinds, rows, pp in zip(num_passes, chunks, stages, strict=True)]
    first_action = offsets_from_counts(np.array(counts))
    num_steps = sum(stages)
    modules = zip(num_passes, chunks, stages, strict=True)
    columns = [_module_columns(index, kinds, rows, pp) for index, (kinds, rows, pp) in enumerate(modules)]
    for kind in (Pass.GRAD_SYNC, Pass.OPTIMIZER):
        module = np.repeat(np.arange(len(stages)), stages)
        stage = np.concatenate([np.arange(pp) for pp in stages])
        none = np.full(num_steps, -1)
        columns.append(np.stack([module, stage, none, none, np.full(num_steps, int(kind))]))
    module, stage, replica, chunk, kind_column = np.concatenate(columns, axis=1)
    num_lanes, lane_offsets, lane_actions = _lane_order(layout, chunks, slots, first_action)
    dep_offsets, dep_actions, dep_bytes = _dependencies(model, layout, shapes, chunks, first_action, len(module))
    return Program(
        model,
        layout,
        shapes,
        tuple(chunks),
        first_action,
        module,
        stage,
        replica,
        chunk,
        kind_column,
        num_lanes,
        lane_offsets,
        lane_actions,
        dep_offsets,
        dep_actions,
        dep_bytes,
    )


def reorder(program: Program, slots: Sequence[Slots]) -> Program:
    """The same actions in the order of other slots; with slots for weight passes where the program has them."""
    _, offsets, actions = _lane_order(program.layout, program.chunks, slots, program.first_action)
    return replace(program, lane_offsets=offsets, lane_actions=actions)


def _module_columns(index: int, num_passes: int, chunks: Chunks, pp: int) -> IntArray:
    """Labels (module, stage, replica, chunk, kind) of a module's passes ``[5, actions]``."""
    shape = (num_passes, len(chunks), pp)
    columns = np.empty((5, *shape), np.int32)
    columns[0] = index
    columns[1] = np.arange(pp)
    columns[2] = chunks.replica[:, None]
    columns[3] = np.arange(len(chunks))[:, None]
    columns[4] = np.array([Pass.FORWARD, Pass.BACKWARD, Pass.WEIGHT])[:num_passes, None, None]
    return columns.reshape(5, -1)


def _lane_order(
    layout: Layout, chunks: Sequence[Chunks], slots: Sequence[Slots], first_action: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    num_groups = 3 * len(chunks)
    num_ties = max(1, *(max(len(rows), blocks.num_stages) for rows, blocks in zip(chunks, layout.blocks, strict=True)))
    last_slot = max(int(times.max(initial=0)) for module_slots in slots for times in module_slots.passes)
    lanes = []
    keys = []
    actions = []
    widths = []

    def occupy(lane: IntArray, position: IntArray, key: IntArray, action: IntArray) -> None:
        lanes.append(lane)
        keys.append(key[position])
        actions.append(action[position])

    for index, (rows, slot, blocks) in enumerate(zip(chunks, slots, layout.blocks, strict=True)):
        # Order inside one slot: forwards in the order of modules, then backwards in reverse, then weight passes.
        forward_tie = np.arange(len(rows))
        backward_tie = np.empty_like(forward_tie)
        backward_tie[np.lexsort((-rows.part, rows.microbatch, rows.replica))] = forward_tie
        block = (rows.replica[:, None] * blocks.num_stages + np.arange(blocks.num_stages)).ravel()
        offsets, entries = take_rows(blocks.offsets, block)
        lane = blocks.lanes[entries]
        position = rows_of(offsets)
        groups = index, 2 * len(chunks) - 1 - index, 3 * len(chunks) - 1 - index
        ties = forward_tie, backward_tie, backward_tie
        first = int(first_action[index])
        for time, group, tie in zip(slot.passes, groups, ties, strict=False):
            key = (time.astype(np.int64) * num_groups + group) * num_ties + tie[:, None]
            occupy(lane, position, key.ravel(), first + np.arange(len(block)))
            widths.append(np.diff(offsets))
            first += len(block)
    step = int(first_action[-1])
    for kind in range(2):
        for index, blocks in enumerate(layout.blocks):
            block = np.arange(len(blocks.held_offsets) - 1)
            stage = block % blocks.num_stages
            key = ((last_slot + 1 + kind) * num_groups + index) * num_ties + stage
            occupy(blocks.held_lanes, rows_of(blocks.held_offsets), key, step + stage)
            widths.append(np.bincount(stage, weights=np.diff(blocks.held_offsets)).astype(np.int64))
            step += blocks.num_stages
    lane = np.concatenate(lanes)
    action = np.concatenate(actions)
    span = (last_slot + 3) * num_groups * num_ties
    order = np.argsort(lane * span + np.concatenate(keys), kind="stable")
    offsets = offsets_from_counts(np.bincount(lane, minlength=layout.num_lanes))
    return np.concatenate(widths), offsets, action[order]


def _dependencies(
    model: ModelSpec,
    layout: Layout,
    shapes: SampleShapes,
    chunks: Sequence[Chunks],
    first_action: IntArray,
    num_actions: int,
) -> tuple[IntArray, IntArray, IntArray]:
    waits = []
    needs = []
    sizes = []
    llm = model.llm_index
    consumer = chunk_of_unit(chunks[llm], len(shapes))
    grid = [
        np.arange(first, beyond).reshape(-1, len(rows), placed.pp) if len(rows) else np.zeros((2, 0, placed.pp), int)
        for first, beyond, rows, placed in zip(first_action, first_action[1:], chunks, layout.modules, strict=False)
    ]
    for index, (module, rows) in enumerate(zip(model.modules, chunks, strict=True)):
        forward, backward, *weight = grid[index]
        tokens = np.add.reduceat(np.append(module.lengths(shapes, rows.members), 0), rows.offsets[:-1])
        split = layout.modules[index].layers_per_stage
        hidden, gradient = (np.outer(tokens, cut).ravel() for cut in module.cut_bytes(split))
        waits += [forward[:, 1:].ravel(), backward[:, :-1].ravel()]
        needs += [forward[:, :-1].ravel(), backward[:, 1:].ravel()]
        sizes += [hidden, gradient]
        for llm_edges in weight:
            waits.append(llm_edges.ravel())
            needs.append(backward.ravel())
            sizes.append(np.zeros(llm_edges.size, np.int64))
        if not module.is_encoder:
            waits.append(backward[:, -1])
            needs.append(forward[:, -1])
            sizes.append(np.zeros(len(rows), np.int64))
        if not module.per_item:
            continue
        producer = rows_of(rows.offsets)
        pair = producer * len(chunks[llm]) + consumer[shapes.item_sample[rows.members]]
        edges, edge = np.unique(pair, return_inverse=True)
        projected = np.bincount(edge, weights=shapes.item_llm_tokens[rows.members], minlength=len(edges))
        size = projected.astype(np.int64) * (BF16_BYTES * model.llm.config.hidden_size)
        llm_edges = edges // len(chunks[llm])
        its_llm = edges % len(chunks[llm])
        if module.is_encoder:
            waits += [grid[llm][0, its_llm, 0], backward[llm_edges, -1]]
            needs += [forward[llm_edges, -1], grid[llm][1, its_llm, 0]]
        else:
            waits += [forward[llm_edges, 0], grid[llm][1, its_llm, -1]]
            needs += [grid[llm][0, its_llm, -1], backward[llm_edges, 0]]
        sizes += [size, size * (module.has_backward if module.is_encoder else model.llm.has_backward)]
    wait = np.concatenate(waits)
    order = np.argsort(wait, kind="stable")
    offsets = offsets_from_counts(np.bincount(wait, minlength=num_actions))
    return offsets, np.concatenate(needs)[order], np.concatenate(sizes)[order]


def chunk_of_unit(chunks: Chunks, num_units: int) -> IntArray:
    """Chunk that holds each unit ``[num_units]``; -1 for units that are not the module's."""
    owner = np.full(num_units, -1)
    owner[chunks.members] = rows_of(chunks.offsets)
    return owner
