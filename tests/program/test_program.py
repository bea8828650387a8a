"""What programs promise (dependencies by sample, every unit once, a documented order), and that corruption is found."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from entrain_bench.balancing.schedules import chain_program, stages_behind
from entrain_bench.base.errors import DeadlockError, UserError
from entrain_bench.program import Pass, Program, Slots, build_program
from entrain_bench.program.assignment import Assignment, Chunks, ModuleAssignment, group_chunks
from entrain_bench.program.layout import Layout
from entrain_bench.program.validate import check_program
from entrain_bench.simulate import place_actions
from entrain_bench.specs.shapes import SampleShapes, shapes_from_lists
from support.builders import (
    AV_MODEL,
    as_ints,
    av_samples,
    chain_layout,
    no_delay,
    passes,
    placed,
    random_av_program,
    random_samples,
    rngs,
    tiny_model,
    uniform_batch,
)

MODEL = tiny_model(encoder=2, llm=2)

# Dependencies and bytes, derived a second time from views of single actions


@settings(max_examples=25, deadline=None)
@given(rngs)
def test_dependencies_and_bytes_follow_from_samples(rng: np.random.Generator) -> None:
    program = random_av_program(rng)
    shapes, layout = program.shapes, program.layout
    views = [program.view(action) for action in range(program.num_actions)]
    owner = [sample for sample in range(len(shapes)) for _ in range(np.diff(shapes.item_offsets)[sample])]
    stages = {m.module: m.pp for m in layout.modules}
    specs = {m.name: m for m in AV_MODEL.modules}
    llm = AV_MODEL.llm.name
    hidden = {name: 2 * spec.config.hidden_size for name, spec in specs.items()}

    for view in views:
        expected: dict[int, int] = {}
        if view.kind is Pass.WEIGHT:
            labels = (view.module, view.replica, view.members, view.microbatch, view.part, view.stage)
            for other in views:
                own = (other.module, other.replica, other.members, other.microbatch, other.part, other.stage)
                if other.kind is Pass.BACKWARD and own == labels:
                    expected[other.index] = 0
        if view.kind in (Pass.FORWARD, Pass.BACKWARD):
            spec = specs[view.module]
            tokens = shapes.item_encoder_tokens if spec.is_encoder else shapes.llm_tokens
            step = -1 if view.kind is Pass.FORWARD else 1
            for other in views:
                same_chunk = (other.module, other.replica, other.members, other.microbatch, other.part) == (
                    view.module,
                    view.replica,
                    view.members,
                    view.microbatch,
                    view.part,
                )
                if same_chunk and other.kind == view.kind and other.stage == view.stage + step:
                    expected[other.index] = sum(int(tokens[m]) for m in view.members) * hidden[view.module]
                last = stages[llm] - 1
                at_the_turn = same_chunk and view.module == llm and view.stage == other.stage == last
                if at_the_turn and (other.kind, view.kind) == (Pass.FORWARD, Pass.BACKWARD):
                    expected[other.index] = 0
                # Encoder to LLM and back: shared samples.
                if view.kind is Pass.FORWARD and view.module == llm and view.stage == 0:
                    items, llm_samples, partner = other.members, view.members, Pass.FORWARD
                elif view.kind is Pass.BACKWARD and view.module != llm and view.stage == stages[view.module] - 1:
                    items, llm_samples, partner = view.members, other.members, Pass.BACKWARD
                else:
                    continue
                encoder, reader = (other, view) if view.module == llm else (view, other)
                if encoder.module == llm or reader.module != llm or other.kind is not partner:
                    continue
                if encoder.stage != stages[encoder.module] - 1 or reader.stage != 0:
                    continue
                shared = [item for item in items if owner[item] in llm_samples]
                if shared:
                    expected[other.index] = sum(int(shapes.item_llm_tokens[i]) for i in shared) * hidden[llm]
        edges = slice(program.dep_offsets[view.index], program.dep_offsets[view.index + 1])
        actions, sizes = program.dep_actions[edges].tolist(), program.dep_bytes[edges].tolist()
        assert len(set(actions)) == len(actions), f"{view}: a dependency is listed twice"
        assert dict(zip(actions, sizes, strict=True)) == expected, str(view)


@settings(max_examples=25, deadline=None)
@given(rngs)
def test_every_unit_is_processed_once_a_module_stage_and_pass_on_its_lanes(rng: np.random.Generator) -> None:
    program = random_av_program(rng)
    check_program(program)
    assert_every_unit_once(program)


def assert_every_unit_once(program: Program) -> None:
    seen: Counter[tuple[str, int, Pass, int]] = Counter()
    steps: Counter[tuple[str, int, Pass]] = Counter()
    lanes: dict[int, set[int]] = {}
    for lane in range(program.layout.num_lanes):
        for view in program.lane(lane):
            assert lane not in lanes.setdefault(view.index, set())
            lanes[view.index].add(lane)
    for action, held in lanes.items():
        view = program.view(action)
        place = program.layout.module(view.module)
        ranks = place.ranks[view.replica, view.stage] if view.replica >= 0 else place.ranks[:, view.stage].ravel()
        first = {int(program.layout.lane_first_rank[lane]) for lane in held}
        assert first <= set(ranks.tolist())
        assert sum(int(program.layout.lane_width[lane]) for lane in held) == len(ranks)
        assert program.num_lanes[action] == len(held)
        if view.replica < 0:
            steps[view.module, view.stage, view.kind] += 1
        for unit in view.members:
            seen[view.module, view.stage, view.kind, unit] += 1
    expected = {
        (module.name, stage, kind, unit)
        for index, (module, place) in enumerate(zip(program.model.modules, program.layout.modules, strict=True))
        for stage in range(place.pp)
        for kind in (Pass.FORWARD, Pass.BACKWARD, Pass.WEIGHT)[: 2 + program.splits_backward(index)]
        for unit in module.units(program.shapes).tolist()
    }
    assert set(seen) == expected
    assert set(seen.values()) <= {1}
    assert set(steps.values()) == {1}
    assert len(steps) == 2 * sum(place.pp for place in program.layout.modules)


@settings(max_examples=25, deadline=None)
@given(rngs)
def test_lanes_run_by_slot_with_the_documented_order_of_ties(rng: np.random.Generator) -> None:
    # Slots are random small integers, so ties abound; the order is rebuilt here from the documentation of Slots.
    vision, audio, llm = AV_MODEL.modules
    layout = Layout((placed(vision, [[[0]]]), placed(audio, [[[0]]]), placed(llm, [[[0]]])), 3)
    shapes = av_samples(rng, 6)
    chunks, slots = [], []
    for module in AV_MODEL.modules:
        units = len(module.units(shapes))
        given_labels = ModuleAssignment(np.zeros(units, np.int64), rng.integers(0, 3, units))
        chunks.append(group_chunks(module, shapes, given_labels, rng.integers(0, 3, units)))
        shape = (len(chunks[-1]), 1)
        weight = rng.integers(0, 3, shape) if rng.integers(2) else None
        slots.append(Slots(rng.integers(0, 3, shape), rng.integers(0, 3, shape), weight))
    program = build_program(AV_MODEL, layout, shapes, chunks, slots)
    entries = []
    for index, (rows, slot) in enumerate(zip(chunks, slots, strict=True)):
        name = AV_MODEL.modules[index].name
        for chunk in range(len(rows)):
            microbatch, part = int(rows.microbatch[chunk]), int(rows.part[chunk])
            text = f"{microbatch}" + (f".{part}" if part else "")
            entries.append(((int(slot.forward[chunk, 0]), 0, index, microbatch, part), f"{name} F{text}"))
            entries.append(((int(slot.backward[chunk, 0]), 1, -index, microbatch, -part), f"{name} B{text}"))
            if slot.weight is not None:
                entries.append(((int(slot.weight[chunk, 0]), 2, -index, microbatch, -part), f"{name} W{text}"))
    assert passes(program, 0) == [text for _, text in sorted(entries)]
    last = [(view.kind, view.module) for view in program.lane(0)][-6:]
    names = [m.name for m in AV_MODEL.modules]
    assert last == [(kind, name) for kind in (Pass.GRAD_SYNC, Pass.OPTIMIZER) for name in names]


def test_steps_follow_the_last_slot_module_by_module_and_stage_by_stage() -> None:
    # Three stages of each module on one rank, one on the next: more stages than chunks.
    vision, llm = tiny_model(encoder=2, llm=2).modules
    layout = Layout((placed(vision, [[[0], [0], [0], [1]]]), placed(llm, [[[1], [0], [0], [0]]])), 1)
    shapes, assignment = uniform_batch(MODEL, 1)
    chunks = [group_chunks(m, shapes, labels) for m, labels in zip(MODEL.modules, assignment.modules, strict=True)]
    slots = [
        Slots(np.array([[0, 1, 2, 3]]), np.array([[15, 14, 13, 12]])),
        Slots(np.array([[4, 5, 6, 7]]), np.array([[11, 10, 9, 8]])),
    ]
    program = build_program(MODEL, layout, shapes, chunks, slots)
    held = (
        [("vision", 0), ("vision", 1), ("vision", 2), ("llm", 1), ("llm", 2), ("llm", 3)],
        [("vision", 3), ("llm", 0)],
    )
    for lane, stages in enumerate(held):
        ran = [(view.kind, view.module, view.stage) for view in program.lane(lane)]
        passes = [(Pass.FORWARD, *stage) for stage in stages] + [(Pass.BACKWARD, *stage) for stage in reversed(stages)]
        assert ran == passes + [(kind, *stage) for kind in (Pass.GRAD_SYNC, Pass.OPTIMIZER) for stage in stages]
    assert program.num_lanes.tolist() == [1] * program.num_actions


# Random assignments


@st.composite
def assignments(draw: st.DrawFn) -> tuple[SampleShapes, Layout, Assignment]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shapes = random_samples(rng, draw(st.integers(1, 8)))
    dp = draw(st.integers(1, 2))
    layout = chain_layout(MODEL, draw(st.integers(1, 2)), draw(st.integers(1, 3)), 4, dp)
    wild = draw(st.sampled_from(["none", "replica", "microbatch", "length", "both"]))
    modules = []
    for module in MODEL.modules:
        units = len(module.units(shapes))
        off = int(rng.integers(-2, 3)) if wild == "length" else 0
        size = max(0, units + off)
        low, high = (-1, dp + 1) if wild in ("replica", "both") else (0, dp)
        first, last = (-1, 8) if wild in ("microbatch", "both") else (0, 6)
        modules.append(ModuleAssignment(rng.integers(low, high, size), rng.integers(first, last, size)))
    return shapes, layout, Assignment(tuple(modules))


def offenders(shapes: SampleShapes, layout: Layout, assignment: Assignment) -> set[int]:
    """Samples with a label out of range, by the definition."""
    wrong = set()
    for module, place, given_labels in zip(MODEL.modules, layout.modules, assignment.modules, strict=True):
        units = module.units(shapes).tolist()
        rows = zip(units, given_labels.replica.tolist(), given_labels.microbatch.tolist(), strict=True)
        for unit, replica, microbatch in rows:
            if not (0 <= replica < place.dp and microbatch >= 0):
                wrong.add(int(shapes.item_sample[unit]) if module.is_encoder else unit)
    return wrong


@pytest.mark.wide
@settings(max_examples=150, deadline=None)
@given(assignments(), st.booleans(), st.integers(0, 3))
def test_random_assignments_run_or_are_rejected_naming_the_sample(
    case: tuple[SampleShapes, Layout, Assignment], split: bool, more: int
) -> None:
    shapes, layout, assignment = case
    items = len(MODEL.encoders[0].units(shapes))
    sizes = [len(m.replica) for m in assignment.modules]
    warmup = [behind + more for behind in stages_behind(layout)]
    if sizes != [items, len(shapes)]:
        with pytest.raises(UserError, match=r"sample \d+|labels for \d+ units"):
            chain_program(MODEL, shapes, layout, assignment, warmup, split)
        return
    wrong = offenders(shapes, layout, assignment)
    if wrong:
        with pytest.raises(UserError) as error:
            chain_program(MODEL, shapes, layout, assignment, warmup, split)
        named = re.search(r"sample (\d+)", str(error.value))
        assert named
        assert int(named[1]) in wrong
        return
    program = chain_program(MODEL, shapes, layout, assignment, warmup, split)
    check_program(program)
    assert_every_unit_once(program)
    encoder, llm = (m.microbatch for m in assignment.modules)
    deferred_only = bool(np.all(llm[shapes.item_sample] >= encoder))
    try:
        start, end, _ = place_actions(program, np.ones(program.num_actions), no_delay(program))
    except DeadlockError:
        assert not deferred_only, "no LLM microbatch precedes its encoder microbatches"
    else:
        assert np.all(
            start[np.repeat(np.arange(program.num_actions), np.diff(program.dep_offsets))] >= end[program.dep_actions]
        )


def small_program(dp: int = 2) -> Program:
    layout = chain_layout(MODEL, 1, 1, 3, dp)
    shapes, assignment = uniform_batch(MODEL, 3, dp)
    behind = stages_behind(layout)
    program = chain_program(MODEL, shapes, layout, assignment, behind, weight_delay=[np.zeros_like(n) for n in behind])
    check_program(program)
    return program


def with_chunks(program: Program, module: int, chunks: Chunks) -> Program:
    rows = list(program.chunks)
    rows[module] = chunks
    return replace(program, chunks=tuple(rows))


@pytest.mark.parametrize("module", [0, 1])
def test_a_dropped_member_is_found(module: int) -> None:
    program = small_program()
    chunks = program.chunks[module]
    lost = int(chunks.members[2])
    offsets = chunks.offsets.copy()
    offsets[3:] -= 1
    broken = with_chunks(program, module, replace(chunks, offsets=offsets, members=np.delete(chunks.members, 2)))
    with pytest.raises(UserError, match=rf"sample {lost} is processed 0 times by {MODEL.modules[module].name}"):
        check_program(broken)


def test_a_member_replaced_by_another_is_found() -> None:
    program = small_program()
    members = program.chunks[1].members.copy()
    members[0] = members[1]
    with pytest.raises(UserError, match=r"is processed (0|2) times by llm"):
        check_program(with_chunks(program, 1, replace(program.chunks[1], members=members)))


def test_an_item_of_another_modality_is_found() -> None:
    shapes = shapes_from_lists(["image", "audio"], [(5, [("image", 8, 2), ("audio", 8, 2)])])
    layout = Layout(tuple(placed(module, [[[rank]]]) for rank, module in enumerate(AV_MODEL.modules)), 1)
    zero = np.zeros(1, np.int64)
    assignment = Assignment(tuple(ModuleAssignment(zero.copy(), zero.copy()) for _ in range(3)))
    program = chain_program(AV_MODEL, shapes, layout, assignment, stages_behind(layout))
    check_program(program)
    chunks = replace(program.chunks[0], offsets=as_ints([0, 2]), members=as_ints([0, 1]))
    with pytest.raises(UserError, match="not of its modalities"):
        check_program(with_chunks(program, 0, chunks))


def test_an_empty_chunk_is_found() -> None:
    program = small_program()
    offsets = program.chunks[0].offsets.copy()
    offsets[1] = 0
    with pytest.raises(UserError, match="empty chunk"):
        check_program(with_chunks(program, 0, replace(program.chunks[0], offsets=offsets)))


def test_an_action_on_a_foreign_lane_is_found() -> None:
    program = small_program()
    order = program.lane_actions.copy()
    here, there = program.lane_offsets[0], program.lane_offsets[1]
    order[[here, there]] = order[[there, here]]
    with pytest.raises(UserError, match=r"rank \d+ runs .* whose layers it does not hold"):
        check_program(replace(program, lane_actions=order))


@pytest.mark.parametrize("kind", list(Pass))
def test_a_missing_action_is_found(kind: Pass) -> None:
    program = small_program()
    victim = int(np.flatnonzero(program.kind == kind)[-1])
    entry = int(np.flatnonzero(program.lane_actions == victim)[0])
    lane = int(np.searchsorted(program.lane_offsets, entry, side="right")) - 1
    offsets = program.lane_offsets.copy()
    offsets[lane + 1 :] -= 1
    broken = replace(program, lane_offsets=offsets, lane_actions=np.delete(program.lane_actions, entry))
    with pytest.raises(UserError, match=r"is listed on \d lanes, not \d"):
        check_program(broken)


@pytest.mark.wide
@settings(max_examples=60, deadline=None)
@given(rngs)
def test_lists_that_name_an_action_on_another_lane_are_found(rng: np.random.Generator) -> None:
    program = random_av_program(rng)
    lanes = np.repeat(np.arange(program.layout.num_lanes), np.diff(program.lane_offsets))
    one, other = rng.integers(0, len(lanes), 2)
    swapped = program.lane_actions[[other, one]]
    held = {lane: {view.index for view in program.lane(lane)} for lane in range(program.layout.num_lanes)}
    foreign = swapped[0] not in held[int(lanes[one])] or swapped[1] not in held[int(lanes[other])]
    assume(foreign)
    order = program.lane_actions.copy()
    order[[one, other]] = swapped
    with pytest.raises(UserError):
        check_program(replace(program, lane_actions=order))
