"""Schedules as slots: from microbatch order to the order of actions on a lane; and checks of what may follow whom.

Routes over the boundary between an encoder and the LLM (arXiv:2605.27678, section 1) are checked, for a mapping whose
shapes are valid may send gradients to the wrong ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from entrain_bench.base.arrays import IntArray
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.program import Program, Slots, build_program, reorder
from entrain_bench.program.assignment import Assignment, Chunks, check_assignment, group_chunks
from entrain_bench.program.boundary import find_ratio, is_colocated
from entrain_bench.program.layout import Layout
from entrain_bench.specs.model import ModelSpec, ModuleSpec
from entrain_bench.specs.shapes import SampleShapes


def one_f_one_b(microbatch: IntArray, num_microbatches: IntArray, warmup: IntArray) -> tuple[IntArray, IntArray]:
    """Slots of forwards and backwards under 1F1B (PipeDream-Flush, arXiv:2006.09503) with a given warm-up (broadcasts).

    A lane runs ``warmup`` forwards (usually one a stage behind), then one forward and one backward in turn, then the
    remaining backwards; its 2K slots are 0..2K-1. ``microbatch`` is the position in the order of a replica that has
    ``num_microbatches``.
    """
    warmup = np.minimum(warmup, num_microbatches)
    forward = np.where(microbatch <= warmup, microbatch, 2 * microbatch - warmup)
    steady = microbatch < num_microbatches - warmup
    backward = np.where(steady, warmup + 2 * microbatch + 1, num_microbatches + microbatch)
    return forward, backward


def stages_behind(layout: Layout, llm: int = -1) -> list[IntArray]:
    """Lanes of a replica's chain that come after each stage, one array a module ``[stages]``.

    The chain runs through the stages of each encoder (modules on the same lanes count once), then those of the LLM, at
    position ``llm`` of the modules, then the generators'.

    Raises:
        IncompatibleError: if the stages form no chain: modules share lanes but not their DP, or a lane of the LLM comes
            before the end of an encoder, or one of a generator before the end of the LLM; or if stages are virtual.
    """
    _refuse_virtual_stages(layout)
    for one, other in combinations(range(len(layout.modules)), 2):
        shared = np.intersect1d(layout.blocks[one].lanes, layout.blocks[other].lanes).size
        if shared and layout.modules[one].dp != layout.modules[other].dp:
            names = f"{layout.modules[one].module} and {layout.modules[other].module}"
            raise IncompatibleError(f"schedule: {names} share ranks, so they need the same DP in a chain of stages")
    first = [blocks.first_lane()[0] for blocks in layout.blocks]
    lanes = np.concatenate(first)
    distinct, appearance = np.unique(lanes, return_index=True)
    position = np.argsort(np.argsort(appearance, kind="stable"), kind="stable")
    behind = [len(distinct) - 1 - position[np.searchsorted(distinct, stages)] for stages in first]
    llm = llm % len(behind)
    for index, later in [*((i, llm) for i in range(llm)), *((llm, j) for j in range(llm + 1, len(behind)))]:
        if behind[index].min() < behind[later].max():
            begins = layout.modules[later].module
            ends = layout.modules[index].module
            raise IncompatibleError(
                f"schedule: stages of {begins} start before the last of {ends}, so they form no chain"
            )
    return behind


def _refuse_virtual_stages(layout: Layout) -> None:
    for placed in layout.modules:
        if placed.stages_per_rank > 1:
            raise IncompatibleError(
                f"schedule: a rank holds {placed.stages_per_rank} stages of {placed.module}, but this schedule "
                "supports one"
            )


def find_places(model: ModelSpec, layout: Layout, apart: bool = False) -> tuple[IntArray, tuple[IntArray, ...]] | None:
    """Lowest rank of each place of the chain of all stages in replica 0 ``[places]``, and each module's places.

    Encoders begin at the first place; the LLM on the place where the longest encoder ends, if its first stage is there,
    otherwise, or if ``apart``, on the next one; generators are on the last. None if modules contradict each other.
    """
    llm = model.llm_index
    blocks = [placed.ranks[0].min(axis=1) for placed in layout.modules]
    ahead = max((placed.pp for placed in layout.modules[:llm]), default=0)
    longest = next((ranks for ranks in blocks[:llm] if len(ranks) == ahead), blocks[llm])
    shared = bool(ahead) and not apart and longest[-1] == blocks[llm][0]
    first = [0] * llm + [ahead - shared]
    count = first[llm] + len(blocks[llm])
    places = [start + np.arange(len(ranks)) for start, ranks in zip(first, blocks, strict=False)]
    places += [np.array([count - 1] if len(ranks) == 1 else []) for ranks in blocks[llm + 1 :]]
    of_place = np.full(count, -1)
    for ranks, module_places in zip(blocks, places, strict=True):
        if len(ranks) != len(module_places) or np.any(
            (of_place[module_places] >= 0) & (of_place[module_places] != ranks)
        ):
            return None
        of_place[module_places] = ranks
    return of_place, tuple(places)


def chain_chunks(
    model: ModelSpec, shapes: SampleShapes, layout: Layout, assignment: Assignment, split_backward: bool
) -> list[Chunks]:
    """Chunks of every module; with split backward an encoder microbatch is cut by the LLM microbatch it feeds.

    The part of an encoder chunk is then the LLM microbatch of its samples.
    """
    check_assignment(assignment, model, layout, shapes)
    consumer = assignment.modules[model.llm_index].microbatch
    chunks = []
    for module, labels in zip(model.modules, assignment.modules, strict=True):
        part = None
        if module.is_encoder and split_backward:
            part = consumer[shapes.item_sample[module.units(shapes)]]
        chunks.append(group_chunks(module, shapes, labels, part))
    return chunks


def backward_microbatch(
    model: ModelSpec, shapes: SampleShapes, assignment: Assignment, chunks: Sequence[Chunks]
) -> list[IntArray]:
    """Microbatch in whose backward slot each chunk runs backward, one array a module ``[chunks]``.

    An encoder chunk waits for the last LLM microbatch that consumes it.
    """
    consumer = assignment.modules[model.llm_index].microbatch
    result = []
    for module, rows in zip(model.modules, chunks, strict=True):
        last = rows.microbatch
        if module.is_encoder and len(rows):
            latest = np.maximum.reduceat(consumer[shapes.item_sample[rows.members]], rows.offsets[:-1])
            last = np.maximum(latest, last)
        result.append(last)
    return result


def chain_program(
    model: ModelSpec,
    shapes: SampleShapes,
    layout: Layout,
    assignment: Assignment,
    warmup: Sequence[IntArray],
    split_backward: bool = False,
    weight_delay: Sequence[IntArray] | None = None,
) -> Program:
    """1F1B over a chain of encoder, LLM and generator stages, whose modules may differ in DP.

    The k-th microbatches of all modules share their slots; no LLM microbatch may come before the encoder microbatches
    it needs. An encoder chunk runs backward in the slot of the LLM microbatch that consumes it, if that comes later
    than its own; with ``split_backward`` samples deferred to a later LLM microbatch form chunks of their own.
    ``warmup`` are the forwards before the first backward, ``weight_delay`` the microbatches by which weight passes come
    after their backwards, both for every module ``[stages]``. Without delays backwards are whole; modules that learn
    nothing have no weight passes.
    """
    chunks = chain_chunks(model, shapes, layout, assignment, split_backward)
    freed = backward_microbatch(model, shapes, assignment, chunks)
    places = microbatches_per_replica(layout, chunks, freed)
    slots = []
    for index, (rows, last, ahead, per_replica) in enumerate(zip(chunks, freed, warmup, places, strict=True)):
        count = per_replica[rows.replica][:, None]
        forward, _ = one_f_one_b(rows.microbatch[:, None], count, ahead)
        _, backward = one_f_one_b(last[:, None], count, ahead)
        weight = None
        if weight_delay is not None and learns(model.modules[index]):
            # A backward's slot, also of microbatches that are not there: those come after all that are.
            _, weight = one_f_one_b(last[:, None] + weight_delay[index], count, ahead)
        slots.append(Slots(forward, backward, weight))
    return build_program(model, layout, shapes, chunks, slots)


def unordered_program(model: ModelSpec, shapes: SampleShapes, layout: Layout, assignment: Assignment) -> Program:
    """A chain's actions and dependencies, which do not depend on slots, in no order yet (``ordered_program``)."""
    chunks = chain_chunks(model, shapes, layout, assignment, split_backward=False)
    empty = [np.zeros((len(rows), placed.pp), np.int64) for rows, placed in zip(chunks, layout.modules, strict=True)]
    return build_program(model, layout, shapes, chunks, [Slots(slots, slots) for slots in empty])


def ordered_program(draft: Program, slot: IntArray) -> Program:
    """The program in the order of a slot for each forward and backward ``[first_action[-1]]``."""
    passes = [(draft.forward_actions(index), draft.backward_actions(index)) for index in range(len(draft.chunks))]
    return reorder(draft, [Slots(slot[forward], slot[backward]) for forward, backward in passes])


def learns(module: ModuleSpec) -> bool:
    """Whether a module has weight gradients, so that its backward can be split."""
    return any(layer.learns for layer in module.kinds)


def three_phase_program(model: ModelSpec, shapes: SampleShapes, layout: Layout, assignment: Assignment) -> Program:
    """All encoder forwards, then 1F1B of the LLM, then all encoder backwards (arXiv:2605.27678, section 2).

    Generators have no place in it.
    For modules that share their ranks: an encoder's activations stay until the last phase. Encoder microbatches run in
    order, forwards one after the other and backwards likewise.

    Raises:
        IncompatibleError: if stages are virtual.
    """
    _refuse_virtual_stages(layout)
    chunks = chain_chunks(model, shapes, layout, assignment, split_backward=False)
    first_llm = 1 + max((int(rows.microbatch.max(initial=-1)) for rows in chunks[:-1]), default=-1)
    llm = chunks[-1]
    count = np.zeros(layout.modules[-1].dp, np.int64)
    np.maximum.at(count, llm.replica, llm.microbatch + 1)
    behind = layout.modules[-1].pp - 1 - np.arange(layout.modules[-1].pp)
    forward, backward = one_f_one_b(llm.microbatch[:, None], count[llm.replica][:, None], behind)
    last_phase = first_llm + 2 * int(count.max())
    slots = []
    for rows, placed in zip(chunks[:-1], layout.modules, strict=False):
        place = np.repeat(rows.microbatch[:, None], placed.pp, axis=1)
        slots.append(Slots(place, last_phase + place))
    return build_program(model, layout, shapes, chunks, [*slots, Slots(first_llm + forward, first_llm + backward)])


def microbatches_per_replica(layout: Layout, chunks: Sequence[Chunks], freed: Sequence[IntArray]) -> list[IntArray]:
    """Places in the order of every replica, one array a module.

    Modules of one DP count together, for they may share lanes.
    """
    counts = {placed.dp: np.zeros(placed.dp, np.int64) for placed in layout.modules}
    for rows, last, placed in zip(chunks, freed, layout.modules, strict=True):
        np.maximum.at(counts[placed.dp], rows.replica, np.maximum(rows.microbatch, last) + 1)
    return [counts[placed.dp] for placed in layout.modules]


def check_colocated(layout: Layout) -> None:
    """Check that every encoder is in one stage on exactly the LLM's ranks, as schedules of three phases need it.

    Raises:
        IncompatibleError: naming the encoder that is not.
    """
    *encoders, llm = layout.modules
    for placed in encoders:
        if not is_colocated(placed, llm) or placed.pp > 1:
            raise IncompatibleError(
                f"layout: a colocated schedule needs {placed.module} in one stage on the same ranks as {llm.module}"
            )


def check_routes(
    model: ModelSpec, shapes: SampleShapes, layout: Layout, assignment: Assignment, *, in_order: bool
) -> None:
    """Check that every item is encoded in the group of the LLM replica that consumes it.

    With ``in_order`` no LLM microbatch may come before an encoder microbatch that it needs.

    Raises:
        IncompatibleError: naming the sample that takes a wrong way.
    """
    check_assignment(assignment, model, layout, shapes)
    *encoders, llm = layout.modules
    consumer = assignment.modules[-1]
    for module, placed, labels in zip(model.encoders, encoders, assignment.modules, strict=False):
        ratio = find_ratio(placed, llm)
        owner = shapes.item_sample[module.units(shapes)]
        wrong = np.flatnonzero(labels.replica // ratio.fan_in != consumer.replica[owner] // ratio.fan_out)
        if wrong.size:
            first = wrong[0]
            raise IncompatibleError(
                f"assignment: sample {shapes.name_of(owner[first])} is encoded by replica {labels.replica[first]} "
                f"of {placed.dp} of {module.name}, which does not feed replica {consumer.replica[owner[first]]} of "
                f"{llm.dp} of {llm.module}"
            )
        late = np.flatnonzero(labels.microbatch > consumer.microbatch[owner]) if in_order else wrong
        if late.size:
            first = late[0]
            raise IncompatibleError(
                f"assignment: sample {shapes.name_of(owner[first])} is in {module.name} microbatch "
                f"{labels.microbatch[first]} and already in {llm.module} microbatch "
                f"{consumer.microbatch[owner[first]]}, but this schedule runs microbatches in order"
            )
