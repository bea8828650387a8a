"""Schedules as slots: from microbatch order to the order on a lane; 1F1B; checks of dependencies."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar

import numpy as np

from entrain_bench.balancing.options import Amount, Eager
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.recomputation import Recomputation
from entrain_bench.base.arrays import FloatArray, IntArray, sum_rows
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.program import Program, Slots, build_program, reorder
from entrain_bench.program.assignment import Assignment, Chunks, check_assignment, group_chunks
from entrain_bench.program.layout import Layout, find_ratio, is_colocated
from entrain_bench.specs.model import ModelSpec, ModuleSpec
from entrain_bench.specs.shapes import SampleShapes


def one_f_one_b(microbatch: IntArray, num_microbatches: IntArray, warmup: IntArray) -> tuple[IntArray, IntArray]:
    """Slots 0..2K-1 of forwards and backwards under 1F1B (arXiv:2006.09503) with a warm-up (broadcasts)."""
    warmup = np.minimum(warmup, num_microbatches)
    forward = np.where(microbatch <= warmup, microbatch, 2 * microbatch - warmup)
    steady = microbatch < num_microbatches - warmup
    backward = np.where(steady, warmup + 2 * microbatch + 1, num_microbatches + microbatch)
    return forward, backward


def stages_behind(layout: Layout, llm: int = -1) -> list[IntArray]:
    """Lanes of a replica's chain after each stage, by module ``[stages]``; ``IncompatibleError`` if there is none."""
    _refuse_virtual_stages(layout)
    for (one, held), (other, also) in combinations(zip(layout.modules, layout.blocks, strict=True), 2):
        if one.dp != other.dp and np.intersect1d(held.lanes, also.lanes).size:
            names = f"{one.module} and {other.module}"
            raise IncompatibleError(f"schedule: {names} share ranks, so they need the same DP in a chain of stages")
    first = [blocks.first_lane()[0] for blocks in layout.blocks]
    lanes = np.concatenate(first)
    distinct, appearance = np.unique(lanes, return_index=True)
    position = np.argsort(np.argsort(appearance, kind="stable"), kind="stable")
    behind = [len(distinct) - 1 - position[np.searchsorted(distinct, stages)] for stages in first]
    llm = llm % len(behind)
    for index, later in [*((i, llm) for i in range(llm)), *((llm, j) for j in range(llm + 1, len(behind)))]:
        if behind[index].min() < behind[later].max():
            names = f"{layout.modules[later].module} start before the last of {layout.modules[index].module}"
            raise IncompatibleError(f"schedule: stages of {names}, so they form no chain")
    return behind


def _refuse_virtual_stages(layout: Layout) -> None:
    for placed in layout.modules:
        if placed.stages_per_rank > 1:
            held = f"a rank holds {placed.stages_per_rank} stages of {placed.module}"
            raise IncompatibleError(f"schedule: {held}, but this schedule supports one")


def find_places(model: ModelSpec, layout: Layout, apart: bool = False) -> tuple[IntArray, tuple[IntArray, ...]] | None:
    """Lowest rank of each place of the chain of all stages in replica 0 ``[places]``, and each module's places.

    The LLM begins where the longest encoder ends, if its first stage is there and not ``apart``, otherwise on the next
    place; generators are on the last. None if modules contradict each other.
    """
    llm = model.llm_index
    blocks = [placed.ranks[0].min(axis=1) for placed in layout.modules]
    ahead = max((placed.pp for placed in layout.modules[:llm]), default=0)
    longest = next((ranks for ranks in blocks[:llm] if len(ranks) == ahead), blocks[llm])
    shared = bool(ahead) and not apart and longest[-1] == blocks[llm][0]
    first = [0] * llm + [ahead - shared]
    count = first[llm] + len(blocks[llm])
    places = [start + np.arange(len(ranks)) for start, ranks in zip(first, blocks, strict=False)]
    places += [np.full(int(len(ranks) == 1), count - 1) for ranks in blocks[llm + 1 :]]
    of_place = np.full(count, -1)
    for ranks, module_places in zip(blocks, places, strict=True):
        held = of_place[module_places]
        if len(ranks) != len(held) or np.any((held >= 0) & (held != ranks)):
            return None
        of_place[module_places] = ranks
    return of_place, tuple(places)


def chain_chunks(
    model: ModelSpec, shapes: SampleShapes, layout: Layout, assignment: Assignment, split_backward: bool
) -> list[Chunks]:
    """Chunks of every module; with split backward encoder microbatches are cut by the LLM microbatches they feed."""
    check_assignment(assignment, model, layout, shapes)
    consumer = assignment.modules[model.llm_index].microbatch
    chunks = []
    for module, labels in zip(model.modules, assignment.modules, strict=True):
        parts = consumer[module.owners(shapes, module.units(shapes))] if module.is_encoder and split_backward else None
        chunks.append(group_chunks(module, shapes, labels, parts))
    return chunks


def backward_microbatch(
    model: ModelSpec, shapes: SampleShapes, assignment: Assignment, chunks: Sequence[Chunks]
) -> list[IntArray]:
    """Return the microbatch in whose slot each chunk runs backward, its last consumer; by module ``[chunks]``."""
    consumer = assignment.modules[model.llm_index].microbatch
    last = [rows.microbatch for rows in chunks]
    for index, rows in enumerate(chunks[: model.llm_index]):
        if len(rows):
            latest = np.maximum.reduceat(consumer[shapes.item_sample[rows.members]], rows.offsets[:-1])
            last[index] = np.maximum(latest, last[index])
    return last


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

    None of the LLM's microbatches may come before those of encoders that it needs. With ``split_backward`` samples of a
    later LLM microbatch form chunks of their own. ``warmup`` are forwards before the first backward, ``weight_delay``
    microbatches by which weight passes follow their backwards, for every module ``[stages]``.
    """

    def slots(index: int, chunks: Chunks, last: IntArray, count: IntArray) -> Slots:
        ahead = warmup[index]
        forward, _ = one_f_one_b(chunks.microbatch[:, None], count[:, None], ahead)
        _, backward = one_f_one_b(last[:, None], count[:, None], ahead)
        weight = None
        if weight_delay is not None and learns(model.modules[index]):
            # Slots of backwards, also of absent microbatches, which come after all others.
            _, weight = one_f_one_b(last[:, None] + weight_delay[index], count[:, None], ahead)
        return Slots(forward, backward, weight)

    return slotted_program(model, shapes, layout, assignment, slots, split_backward)


def slotted_program(
    model: ModelSpec,
    shapes: SampleShapes,
    layout: Layout,
    assignment: Assignment,
    slots: Callable[[int, Chunks, IntArray, IntArray], Slots],
    split_backward: bool = False,
) -> Program:
    """The program of a chain in the order that ``slots(module, chunks, last microbatch, replica's places)`` gives."""
    chunks = chain_chunks(model, shapes, layout, assignment, split_backward)
    freed = backward_microbatch(model, shapes, assignment, chunks)
    modules = zip(chunks, freed, microbatches_per_replica(layout, chunks, freed), strict=True)
    ordered = [slots(index, rows, last, count[rows.replica]) for index, (rows, last, count) in enumerate(modules)]
    return build_program(model, layout, shapes, chunks, ordered)


def microbatches_per_replica(layout: Layout, chunks: Sequence[Chunks], freed: Sequence[IntArray]) -> list[IntArray]:
    """Return the number of places of every replica, one array per module; modules with equal DP count together."""
    counts = {placed.copies: np.zeros(placed.copies, np.int64) for placed in layout.modules}
    for rows, last, placed in zip(chunks, freed, layout.modules, strict=True):
        np.maximum.at(counts[placed.copies], rows.replica, last + 1)
    return [counts[placed.copies] for placed in layout.modules]


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
    return any(layer.trains for layer in module.kinds)


def three_phase_program(model: ModelSpec, shapes: SampleShapes, layout: Layout, assignment: Assignment) -> Program:
    """All encoder forwards, then 1F1B of the LLM, then all encoder backwards (arXiv:2605.27678, section 2)."""
    _refuse_virtual_stages(layout)
    behind = layout.modules[-1].pp - 1 - np.arange(layout.modules[-1].pp)
    labels = [labelled.microbatch for labelled in assignment.modules]
    first_llm = 1 + max((int(microbatch.max(initial=-1)) for microbatch in labels[:-1]), default=-1)
    last_phase = first_llm + 2 * (1 + max(int(microbatch.max(initial=-1)) for microbatch in labels))

    def slots(index: int, chunks: Chunks, _: IntArray, count: IntArray) -> Slots:
        place = chunks.microbatch[:, None]
        if index == model.llm_index:
            forward, backward = one_f_one_b(place, count[:, None], behind)
            return Slots(first_llm + forward, first_llm + backward)
        place = np.repeat(place, layout.modules[index].pp, axis=1)
        return Slots(place, last_phase + place)

    return slotted_program(model, shapes, layout, assignment, slots)


def check_colocated(layout: Layout) -> None:
    """Raise ``IncompatibleError`` for an encoder that is not in one stage on exactly the LLM's ranks."""
    *encoders, llm = layout.modules
    for placed in encoders:
        if not is_colocated(placed, llm) or placed.pp > 1:
            needed = f"{placed.module} in one stage on the same ranks as {llm.module}"
            raise IncompatibleError(f"layout: a colocated schedule needs {needed}")


def check_routes(
    model: ModelSpec, shapes: SampleShapes, layout: Layout, assignment: Assignment, *, in_order: bool
) -> None:
    """Raise ``IncompatibleError`` for an item in another group than its sample's LLM, or later (``in_order``)."""
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
    if in_order:
        check_order(model, shapes, assignment)


def check_order(model: ModelSpec, shapes: SampleShapes, assignment: Assignment) -> None:
    """Raise ``IncompatibleError`` for a sample whose LLM microbatch comes before one of an encoder that it needs."""
    consumer = assignment.modules[model.llm_index].microbatch
    for module, labels in zip(model.encoders, assignment.modules, strict=False):
        owner = shapes.item_sample[module.units(shapes)]
        for item in np.flatnonzero(labels.microbatch > consumer[owner])[:1]:
            raise IncompatibleError(
                f"assignment: sample {shapes.name_of(owner[item])} is in {module.name} microbatch "
                f"{labels.microbatch[item]} and already in {model.llm.name} microbatch {consumer[owner[item]]}, but "
                "this schedule runs microbatches in order"
            )


@dataclass(frozen=True, slots=True)
class OneForwardOneBackward(Recomputation):
    """1F1B over the chain of all stages; a microbatch keeps its place in all modules.

    Attributes:
        eager: stages with more warm-up forwards than 1F1B's one per following stage: none, those of encoders, or all.
        max_extra_forwards: how many more at most; None: as many as memory allows.
    """

    handles_generators: ClassVar[bool] = True

    eager: Eager = "none"
    max_extra_forwards: Amount | None = None

    def schedule(self, shapes: SampleShapes, layout: Layout, assignment: Assignment, profile: Profile) -> Program:
        """Return the program; ``IncompatibleError`` if the modules do not form a chain."""
        return self.in_chain(shapes, layout, assignment, profile)

    def in_chain(
        self, shapes: SampleShapes, layout: Layout, assignment: Assignment, profile: Profile, split: bool = False
    ) -> Program:
        """Return the 1F1B program over the chain of all stages with this warm-up; ``split``: see ``chain_program``."""
        model = profile.job.model
        warmup = stages_behind(layout, model.llm_index)
        program = chain_program(model, shapes, layout, assignment, warmup, split)
        if self.eager != "none" and self.max_extra_forwards != 0:
            freed = backward_microbatch(model, shapes, assignment, program.chunks)
            warmup = eager_warmup(program, freed, profile, self.eager == "encoder", self.max_extra_forwards)
            program = chain_program(model, shapes, layout, assignment, warmup, split)
        return self.within_memory(program, profile)


def eager_warmup(
    program: Program, freed: Sequence[IntArray], profile: Profile, only_encoders: bool, max_extra: int | None = None
) -> list[IntArray]:
    """Return the longest warm-up of each stage that fits memory, at most ``max_extra`` beyond 1F1B's ``[stages]``."""
    job = profile.job
    memory = profile.memory
    layout = program.layout
    given, moving = memory.handed_bytes(program)
    room = job.planning_budget_bytes - memory.lane_state_bytes(layout) - moving
    num_microbatches = 1 + max(int(last.max(initial=0)) for last in freed)
    # A microbatch that is held keeps its own tensors of another module.
    need = given[:, None] * (1.0 + np.arange(num_microbatches))
    modules = zip(job.model.modules, layout.modules, layout.blocks, program.chunks, freed, strict=True)
    for module, placed, blocks, rows, last in modules:
        tokens = sum_rows(rows.offsets, module.lengths(program.shapes, rows.members))
        kept, working = memory.token_bytes(module, placed)
        held = held_tokens(rows, tokens, placed.dp, num_microbatches, last)
        bytes_held = kept[:, None] * held + (working * tokens.max(initial=0.0))[:, None]
        per_block = np.tile(bytes_held, (placed.dp, 1))
        need[blocks.lanes] += np.repeat(per_block, np.diff(blocks.offsets), axis=0)
    longest = (need <= room[:, None]).sum(axis=1) - 1
    behind = stages_behind(layout, job.model.llm_index)
    # The longest warm-up of a stage of the chain in all replicas; the stage has as many behind it as its index here.
    fits = np.full(1 + max(int(stages.max()) for stages in behind), num_microbatches)
    for blocks, stages in zip(layout.blocks, behind, strict=True):
        np.minimum.at(fits, stages, longest[blocks.first_lane()].min(axis=0))
    warmup = np.arange(len(fits))
    extra = num_microbatches if max_extra is None else max_extra
    last_eager = 1 + int(behind[job.model.llm_index].max()) if only_encoders else 0
    ahead = num_microbatches
    for stage in range(len(fits) - 1, last_eager - 1, -1):
        warmup[stage] = max(stage, min(fits[stage], ahead, stage + extra))
        ahead = warmup[stage] - 1
    return [warmup[stages] for stages in behind]


def held_tokens(
    rows: Chunks, tokens: FloatArray, num_replicas: int, num_microbatches: int, freed: IntArray
) -> FloatArray:
    """Return the most tokens a stage of any replica holds after a warm-up of w = 0..K-1 forwards ``[w]``."""
    arrived, gone = np.zeros((2, num_replicas, num_microbatches + 1))
    np.add.at(arrived, (rows.replica, rows.microbatch + 1), tokens)
    np.add.at(gone, (rows.replica, freed + 1), tokens)
    arrived = arrived.cumsum(axis=1)[:, 1:]
    gone = gone.cumsum(axis=1)
    forward = np.arange(num_microbatches)
    return np.array([(arrived - gone[:, np.maximum(forward - warmup, 0)]).max() for warmup in forward])
