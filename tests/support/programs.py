"""Random programs of any layout, and whether a reported deadlock is one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from entrain_bench.program import Pass, Program, Slots, build_program
from entrain_bench.program.assignment import ModuleAssignment, group_chunks
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.specs.framework import P2P, FrameworkOptions
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.specs.sharding import HYBRID, ZERO1, ZERO3
from support.builders import (
    StuckError,
    placed,
    samples,
    tiny_model,
)

MODEL = tiny_model(encoder=2, llm=2)
TWO_ENCODERS = tiny_model(encoder=2, llm=2, audio=2)
VISION, LLM = MODEL.modules

# Layouts in which modules differ in DP, TP and placement; ranks are [dp, pp, tp * cp].
LAYOUTS = {
    "one rank for all": ([[[0]]], [[[0]]]),
    "disjoint chain": ([[[0], [1]]], [[[2], [3]]]),
    "disjoint chains": ([[[0], [1]], [[4], [5]]], [[[2], [3]], [[6], [7]]]),
    "disjoint, encoder dp 3, llm dp 1": ([[[0]], [[1]], [[2]]], [[[3], [4]]]),
    "disjoint, encoder dp 1, llm dp 2": ([[[0, 1]]], [[[2], [3]], [[4], [5]]]),
    "colocated, encoder tp 1 dp 4, llm tp 4 dp 1": ([[[r]] for r in range(4)], [[[0, 1, 2, 3]]]),
    "colocated, encoder tp 2 dp 2, llm tp 4 dp 1": ([[[0, 1]], [[2, 3]]], [[[0, 1, 2, 3]]]),
    "colocated, encoder tp 1 dp 4, llm tp 2 pp 2": ([[[r]] for r in range(4)], [[[0, 1], [2, 3]]]),
    "colocated, encoder tp 4, llm tp 2 dp 2": ([[[0, 1, 2, 3]]], [[[0, 1]], [[2, 3]]]),
    "colocated across, encoder tp 2 dp 2, llm tp 2 dp 2": ([[[0, 1]], [[2, 3]]], [[[0, 2]], [[1, 3]]]),
    "partly shared ranks": ([[[0, 1]]], [[[1, 2], [3, 4]]]),
    "reversed chain": ([[[3], [2]]], [[[1], [0]]]),
}

# Everything that moves gradients, weights and what stages hand on.
frameworks = st.builds(
    FrameworkOptions,
    distributed_optimizer=st.booleans(),
    overlap_grad_reduce=st.booleans(),
    overlap_param_gather=st.booleans(),
    align_param_gather=st.booleans(),
    p2p=st.sampled_from(P2P),
    sequence_parallel=st.booleans(),
    encoder_sp=st.booleans(),
    encoder_cp=st.booleans(),
    encoder_optimizers=st.sampled_from([1, 2, 4]),
    tp_overlap=st.sampled_from([0.0, 0.5, 1.0]),
)


# Kinds of sharding of random layouts.
WHOLE_OR_WEIGHTS = (ZERO1, ZERO3, ZERO3, ZERO3)


def handmade_layout(name: str) -> Layout:
    encoder, llm = LAYOUTS[name]
    return Layout(
        (placed(VISION, encoder, tp=len(encoder[0][0])), placed(LLM, llm, tp=len(llm[0][0]))), num_microbatches=4
    )


def random_shapes(rng: np.random.Generator) -> SampleShapes:
    return samples(*[(10, [8] * int(rng.integers(0, 3))) for _ in range(int(rng.integers(1, 9)))])


def random_program(
    rng: np.random.Generator,
    layout: Layout,
    model: ModelSpec = MODEL,
    shapes: SampleShapes | None = None,
    splits: bool = True,
) -> Program:
    """Random chunks on random replicas, in a random order that agrees with the dependencies.

    With ``splits`` the backwards of some modules are split, except those that scatter gradients.
    """
    shapes = random_shapes(rng) if shapes is None else shapes
    chunks = []
    for module, place in zip(model.modules, layout.modules, strict=True):
        units = len(module.units(shapes))
        number = rng.integers(0, 4, units)
        assignment = ModuleAssignment(_random_groups(rng, place, number), number)
        chunks.append(group_chunks(module, shapes, assignment, rng.integers(0, 2, units)))
    zeros = [np.zeros((len(rows), place.pp), np.int64) for rows, place in zip(chunks, layout.modules, strict=True)]
    late = [splits and not place.scatters and bool(rng.integers(2)) for place in layout.modules]
    slots = [Slots(z, z, z if own else None) for z, own in zip(zeros, late, strict=True)]
    unordered = build_program(model, layout, shapes, chunks, slots)
    position = random_extension(rng, unordered)
    slots = [
        Slots(
            position[unordered.forward_actions(index)],
            position[unordered.backward_actions(index)],
            position[unordered.weight_actions(index)] if unordered.splits_backward(index) else None,
        )
        for index in range(len(chunks))
    ]
    return build_program(model, layout, shapes, chunks, slots)


def _random_groups(rng: np.random.Generator, place: ModuleLayout, number: np.ndarray) -> np.ndarray:
    """Any group for each unit; a microbatch of a sharded module has groups without a common rank."""
    if not place.scatters or len(place.widths) < 2:
        return rng.integers(0, place.copies, len(number))
    size = np.array([tp * cp for tp, cp in place.widths])[place.degree_of_copy]
    first = np.concatenate([np.arange(count) for count in place.num_groups]) * size
    found = np.zeros(len(number), np.int64)
    for each in range(4):
        chosen: list[int] = []
        for group in rng.permutation(place.copies).tolist():
            if all(first[group] + size[group] <= first[o] or first[o] + size[o] <= first[group] for o in chosen):
                chosen.append(group)
        found[number == each] = rng.choice(chosen, np.count_nonzero(number == each))
    return found


def random_layout(rng: np.random.Generator, model: ModelSpec) -> Layout:
    """Random degrees of every module, virtual stages among them, on ranks of its own or from rank 0 on.

    Or all modules on the same ranks in one stage, sharded most of them, half of these layouts with groups of several
    widths. Or groups of several widths in stages.
    """
    match int(rng.integers(6)):
        case 0:
            return random_shards(rng, model, WHOLE_OR_WEIGHTS)
        case 1 | 2:
            return _random_widths(rng, model)
    modules, free = [], 0
    for module in model.modules:
        tp, cp = ((1, 1), (1, 1), (2, 1), (1, 2), (2, 2))[rng.integers(5)]
        dp, blocks, turns = rng.integers(1, 4), rng.integers(1, 3), rng.integers(1, 3)
        first = free if rng.integers(2) else 0
        ranks = first + np.arange(dp * blocks * tp * cp).reshape(dp, blocks, tp * cp)
        free = max(free, -(-(int(ranks.max()) + 1) // 4) * 4)
        place = placed(module, np.tile(ranks, (1, turns, 1)), tp, cp, recompute=bool(rng.integers(2)))
        modules.append(replace(place, offload=not rng.integers(4)))
    return Layout(tuple(modules), 4, single_rank_boundary=not rng.integers(4))


def random_shards(rng: np.random.Generator, model: ModelSpec, kinds: Sequence[str], node: int = 1) -> Layout:
    """All modules on the same ranks in one stage, of kinds of sharding; hybrid ones on whole nodes of so many ranks."""
    degrees = ([(1, 1)], [(2, 1), (1, 2)], [(2, 2)])[rng.integers(3)]
    dp, width, grouped = rng.integers(1, 4), degrees[0][0] * degrees[0][1], rng.integers(2)
    ranks, modules = np.arange(dp * width).reshape(dp, 1, width), []
    for module in model.modules:
        place = placed(module, ranks, *degrees[rng.integers(len(degrees))], recompute=bool(rng.integers(2)))
        widths = _some_widths(rng, place.tp, ranks.size) if grouped else ()
        kind = kinds[rng.integers(len(kinds))]
        if kind == HYBRID and ranks.size % node:
            kind = ZERO3
        place = replace(place, nodes=ranks.size // node if kind == HYBRID else 1)
        modules.append(replace(place, sharding=kind, widths=widths))
    return Layout(tuple(modules), 4, single_rank_boundary=not rng.integers(4))


def _random_widths(rng: np.random.Generator, model: ModelSpec) -> Layout:
    """Groups of several widths in most modules; stages of the others anywhere on the same ranks."""
    modules = []
    for module in model.modules:
        tp, pp = ((1, 1), (2, 1), (1, 2), (2, 2))[rng.integers(4)]
        # Ranks of a stage are consecutive.
        ranks = np.arange(8).reshape(pp, -1, tp).swapaxes(0, 1)
        place = placed(module, ranks, tp, 1, recompute=bool(rng.integers(2)))
        widths = _some_widths(rng, tp, 8 // pp)
        modules.append(replace(place, widths=widths if rng.integers(4) else ()))
    return Layout(tuple(modules), 4, single_rank_boundary=not rng.integers(4))


def _some_widths(rng: np.random.Generator, tp: int, ranks: int) -> tuple[tuple[int, int], ...]:
    """Up to three widths that a number of ranks and a TP allow, narrow to wide; the first fills the ranks."""
    offered = [(1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (4, 1), (2, 4)]
    fits = [own for own in offered if own[0] % tp == 0 and own[0] * own[1] <= ranks]
    widths = {fits[each] for each in rng.integers(0, len(fits), 3)}
    while ranks % min(own[0] * own[1] for own in widths):
        widths |= {fits[int(rng.integers(len(fits)))]}
    return tuple(sorted(widths, key=lambda own: (own[0] * own[1], own)))


def random_extension(rng: np.random.Generator, program: Program) -> np.ndarray:
    """Position of every action in a random order in which nothing precedes what it waits for.

    Passes that begin together because of their collectives have one place: replicas have them in one order.
    """
    place_of = [_place(program, action) for action in range(program.num_actions)]
    needs: dict[tuple[int, ...], set[tuple[int, ...]]] = {place: set() for place in place_of}
    for action, place in enumerate(place_of):
        entries = slice(program.dep_offsets[action], program.dep_offsets[action + 1])
        needs[place] |= {place_of[needed] for needed in program.dep_actions[entries].tolist()}
    position = {}
    for at in range(len(needs)):
        ready = [place for place, missing in needs.items() if not missing]
        chosen = ready[rng.integers(0, len(ready))]
        position[chosen] = at
        del needs[chosen]
        for missing in needs.values():
            missing.discard(chosen)
    return np.array([position[place] for place in place_of])


def _place(program: Program, action: int) -> tuple[int, ...]:
    index, view = int(program.module[action]), program.view(action)
    place = program.layout.modules[index]
    forward = program.kind[action] == Pass.FORWARD
    if view.members and (place.sharded if forward else place.scatters):
        return index, view.kind, view.microbatch, view.part
    if view.members and place.expert_span > 1 and view.kind is not Pass.WEIGHT:
        return index, view.kind, view.stage, view.replica // place.expert_span, view.microbatch, view.part
    return (action,)


def random_times(rng: np.random.Generator, program: Program) -> tuple[np.ndarray, np.ndarray]:
    """Whole numbers, so that sums are exact whatever their order; zeros included."""
    duration = rng.integers(0, 8, program.num_actions).astype(np.float64)
    return duration, rng.integers(0, 5, len(program.dep_actions)).astype(np.float64)


def swap_entries(rng: np.random.Generator, program: Program, swaps: int) -> Program:
    order = program.lane_actions.copy()
    for _ in range(swaps):
        lane = int(rng.integers(0, program.layout.num_lanes))
        one, other = rng.integers(program.lane_offsets[lane], program.lane_offsets[lane + 1], 2)
        order[[one, other]] = order[[other, one]]
    return replace(program, lane_actions=order)


def assert_cycle_is_real(program: Program, message: str, stuck: StuckError) -> None:
    """Every "rank r at A needs B" is true, and each rank named next holds what the one before it waits for.

    True means: r is a rank of a lane whose next action is A; and A waits for the result of B, which has not run; or
    A = B occupies several lanes, not all of which have come to it.
    """
    head, _, rest = message.partition("a cycle of waits: ")
    assert head == "program: deadlock, "
    names: dict[str, int] = {}
    for action in range(program.num_actions):
        names.setdefault(str(program.view(action)), action)
    waits = [re.fullmatch(r"rank (\d+) at (.+) needs (.+)", part) for part in rest.split("; ")]
    assert waits
    lanes = [set(np.flatnonzero(program.layout.lane_first_rank == int(m[1])).tolist()) for m in waits if m]
    assert len(lanes) == len(waits), message
    orders = [
        program.lane_actions[lo:hi].tolist()
        for lo, hi in zip(program.lane_offsets[:-1], program.lane_offsets[1:], strict=True)
    ]
    for index, match in enumerate(waits):
        assert match
        (lane,) = lanes[index]
        (next_lane,) = lanes[(index + 1) % len(waits)]
        at, needed = names[match[2]], names[match[3]]
        assert stuck.heads[lane] == at, match[0]
        assert needed not in stuck.done, match[0]
        if at != needed:
            inputs = program.dep_actions[program.dep_offsets[at] : program.dep_offsets[at + 1]]
            assert needed in inputs, match[0]
        else:
            assert stuck.heads[next_lane] != at, f"{match[0]}: the next rank has come to it"
        assert needed in orders[next_lane], f"{match[0]}: the next rank does not run it"
