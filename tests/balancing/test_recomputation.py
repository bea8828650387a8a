"""Recomputation by chunk: the choice against brute force, and the programs that come of it."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.balancing.planning import recompute_choices
from entrain_bench.balancing.recomputation import (
    LaneOffers,
    greedy,
    recompute_all,
    recompute_by_chunk,
    recompute_by_stage,
)
from entrain_bench.balancing.schedules import OneForwardOneBackward, chain_program, stages_behind
from entrain_bench.base.arrays import FloatArray
from entrain_bench.costs.memory import Memory
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program import Program, recompute_chunks
from entrain_bench.program.layout import Layout
from entrain_bench.specs.job import PLANNING_SHARE, LayoutRequest
from support.builders import (
    chain_layout,
    placed,
    profile_of,
    tiny_cluster,
    tiny_job,
    tiny_model,
    uniform_batch,
)

MODEL = tiny_model(encoder=3, llm=4)
VISION, LLM = MODEL.modules


def program_of(layout: Layout, count: int = 4) -> Program:
    shapes, assignment = uniform_batch(MODEL, count, layout.modules[-1].dp)
    return chain_program(MODEL, shapes, layout, assignment, stages_behind(layout))


def test_all_and_nothing_are_priced_as_the_layouts_that_say_so() -> None:
    truth = CostTruth(MODEL, tiny_cluster())
    plain, again = (program_of(chain_layout(MODEL, 1, 2, 4, dp=2, recompute=flag)) for flag in (False, True))
    nothing = recompute_chunks(plain, [0 * own for own in recompute_all(plain).remade])
    for chosen, whole in ((nothing, plain), (recompute_all(plain), again)):
        ours, theirs = truth.price(chosen), truth.price(whole)
        assert np.array_equal(ours.duration_s, theirs.duration_s)
        assert np.array_equal(ours.release_s, theirs.release_s)
        for own, other in zip(ours.steps.lag_s, theirs.steps.lag_s, strict=True):
            assert np.array_equal(own, other)
        memory = Memory(MODEL)
        assert memory.over_program(chosen) == pytest.approx(memory.over_program(whole), rel=1e-12)


def test_each_layer_adds_its_forward_and_frees_what_it_kept() -> None:
    truth, program = CostTruth(MODEL, tiny_cluster()), program_of(chain_layout(MODEL, 1, 2, 2), 2)
    remade = [np.array([[1], [0]]), np.array([[0, 2], [0, 0]])]
    chosen, memory = recompute_chunks(program, remade), Memory(MODEL)
    more = truth.price(chosen).duration_s - truth.price(program).duration_s
    less = memory.action_bytes(program)[0] - memory.action_bytes(chosen)[0]
    for index, (module, place) in enumerate(zip(MODEL.modules, program.layout.modules, strict=True)):
        kind = next(number for number, kind in enumerate(module.kinds) if kind.kind == "block")
        length = np.array([40 if module is VISION else 20])
        times = truth.layer_times
        forward = times.layers_s(module, times.loads(module, length, np.array([0, 1])), 1, 1)[kind].forward_s[0]
        kept, _ = memory.layer_bytes(module, place)
        saved = (kept[kind] - module.kinds[kind].held_bytes(1, False)) * length[0]
        backward, ahead = program.backward_actions(index), program.forward_actions(index)
        assert more[backward] == pytest.approx(remade[index] * forward, rel=1e-9, abs=1e-15)
        assert np.all(more[ahead] == 0)
        assert less[ahead] == pytest.approx(remade[index] * saved, rel=1e-12)
        assert less[backward] == pytest.approx(-remade[index] * saved, rel=1e-12)


@st.composite
def lanes(draw: st.DrawFn) -> LaneOffers:
    """Up to five intervals whose begins and ends alternate in any way, each of at most two layers."""
    count = draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    first, last, entry, opened = np.zeros(count, int), np.zeros(count, int), 0, []
    waiting = list(range(count))
    while waiting or opened:
        if waiting and (not opened or rng.random() < 0.6):
            opened.append(waiting.pop(0))
            first[opened[-1]] = entry
        else:
            last[opened.pop(int(rng.integers(len(opened))))] = entry
        entry += 1
    return LaneOffers(
        first,
        last,
        rng.integers(1, 3, count),
        rng.integers(1, 6, count),
        rng.integers(1, 10, count),
        rng.integers(0, 16, entry),
    )


def held(lane: LaneOffers, kept: tuple[int, ...]) -> list[int]:
    return [
        sum(
            number * int(size)
            for number, size, first, last in zip(kept, lane.size, lane.first, lane.last, strict=True)
            if first <= entry <= last
        )
        for entry in range(len(lane.spare))
    ]


@settings(max_examples=150, deadline=None)
@given(lanes())
def test_the_choice_fits_and_saves_no_more_than_brute_force(lane: LaneOffers) -> None:
    best = 0
    for kept in product(*(range(int(most) + 1) for most in lane.most)):
        if all(taken <= spare for taken, spare in zip(held(lane, kept), lane.spare, strict=True)):
            best = max(best, int((np.array(kept) * lane.gain).sum()))
    quick = greedy(lane)
    assert all(taken <= spare for taken, spare in zip(held(lane, tuple(quick)), lane.spare, strict=True))
    assert np.all((quick >= 0) & (quick <= lane.most))
    assert int((quick * lane.gain).sum()) <= best


def test_the_quick_choice_prefers_what_is_held_briefly() -> None:
    # Room for one of: a long interval that saves 3, and two short ones, one after the other, that save 2 each.
    lane = LaneOffers(
        np.array([0, 1, 3]), np.array([5, 2, 4]), *(np.array([1, 1, 1]),) * 2, np.array([3, 2, 2]), np.ones(6, int)
    )
    assert greedy(lane).tolist() == [0, 1, 1]


def test_time_is_bought_back_within_the_budget() -> None:
    layout = chain_layout(MODEL, 1, 2, 6)
    plain, memory = program_of(layout, 6), Memory(MODEL)
    frugal = recompute_all(plain)
    least, most = (float(memory.peak_bytes(one).max()) for one in (frugal, plain))
    assert least < most
    shares = []
    for share in (0.0, 0.6, 2.0):
        budget = least + share * (most - least) + 1024 * 8
        shapes = frugal.shapes
        profile = profile_of(tiny_job(MODEL, budget_bytes=budget / PLANNING_SHARE), shapes)
        bought = recompute_by_chunk(frugal, profile)
        assert recompute_by_chunk(plain, profile) is plain
        assert memory.peak_bytes(bought).max() <= budget
        assert np.array_equal(bought.lane_actions, frugal.lane_actions)
        shares.append(sum(int(own.sum()) for own in bought.remade))
    assert shares[0] > shares[1] > shares[2] == 0


def test_a_stage_on_two_lanes_keeps_what_both_can() -> None:
    # The LLM's only stage on two ranks, one of which holds the encoder as well and has less room.
    layout = Layout((placed(VISION, [[[0]]]), placed(LLM, [[[0, 1]]], tp=2)), 2)
    shapes, assignment = uniform_batch(MODEL, 2)
    program = chain_program(MODEL, shapes, layout, assignment, [np.zeros(1, np.int64)] * 2)
    frugal, memory = recompute_all(program), Memory(MODEL)
    budget = float(memory.peak_bytes(frugal).max()) + 64 * 1024
    profile = profile_of(tiny_job(MODEL, budget_bytes=budget / PLANNING_SHARE), shapes)
    bought = recompute_by_chunk(frugal, profile)
    assert np.all(memory.peak_bytes(bought) <= budget)
    assert bought.remade[1].max() < frugal.remade[1].max()


def test_any_order_takes_it_and_what_the_user_asks_for_comes_first() -> None:
    layout = chain_layout(MODEL, 1, 2, 6)
    shapes, assignment = uniform_batch(MODEL, 6)
    plain, memory = program_of(layout, 6), Memory(MODEL)
    least, most = (float(memory.peak_bytes(one).max()) for one in (recompute_all(plain), plain))
    budget = (least + most) / 2

    def scheduled(choice: str, recompute: tuple[str, ...] | None = None) -> Program:
        request = LayoutRequest(recompute=recompute)
        job = tiny_job(MODEL, request=request, budget_bytes=budget / PLANNING_SHARE)
        scheduler = OneForwardOneBackward(memory=choice)
        return scheduler.schedule(shapes, layout, assignment, profile_of(job, shapes))

    assert scheduled("module").remade == scheduled("greedy", ()).remade == ()
    program = scheduled("greedy")
    assert memory.peak_bytes(program).max() <= budget < most
    assert np.array_equal(program.lane_actions, plain.lane_actions)


def test_planners_leave_the_choice_to_the_scheduler() -> None:
    job = tiny_job(MODEL)
    assert recompute_choices(job, chosen_later=True) == [(False, False)]
    asked = tiny_job(MODEL, request=LayoutRequest(recompute=("llm",)))
    assert recompute_choices(asked, chosen_later=True) == [(False, True)]


def by_stage(layout: Layout, budget_bytes: float, count: int = 4) -> tuple[Program, FloatArray]:
    """The program, and the highest memory of each lane if nothing is recomputed."""
    program = program_of(layout, count)
    profile = profile_of(tiny_job(MODEL, budget_bytes=budget_bytes / 0.95), program.shapes)
    return recompute_by_stage(recompute_all(program), profile), Memory(MODEL).peak_bytes(program)


@pytest.mark.parametrize(
    ("rule", "choices"),
    [
        ("any", {(False, False), (True, False), (False, True), (True, True)}),
        ("with_llm", {(False, False), (False, True), (True, True)}),
        ("together", {(False, False), (True, True)}),
    ],
)
def test_what_recomputes_obeys_the_rule_of_a_framework(rule: str, choices: set[tuple[bool, ...]]) -> None:
    # Encoder, LLM.
    assert {*recompute_choices(tiny_job(MODEL, request=LayoutRequest(recompute_rule=rule)))} == choices


def test_stages_recompute_no_more_than_memory_demands() -> None:
    layout, memory = chain_layout(MODEL, 2, 2, 4, dp=2), Memory(MODEL)
    plain = program_of(layout)
    whole, peak = by_stage(layout, 1e12)
    assert not whole.remade
    nothing, _ = by_stage(layout, 1.0)
    assert [own.tolist() for own in nothing.remade] == [own.tolist() for own in recompute_all(plain).remade]
    # A byte less than the LLM's last stage takes.
    budget = float(peak[3]) - 1.0
    some, _ = by_stage(layout, budget)
    least = memory.peak_bytes(recompute_all(plain))
    for index, blocks in enumerate(layout.blocks):
        remade = some.remade[index]
        assert np.all(remade == remade[0]), "all chunks of a stage alike"
        for stage in range(blocks.num_stages):
            lanes = blocks.of_stage(stage)
            if peak[lanes].max() <= budget:
                assert not remade[:, stage].any()
            elif least[lanes].max() <= budget:
                assert memory.peak_bytes(some)[lanes].max() <= budget
                # One layer more would not fit.
                fewer = [own.copy() for own in some.remade]
                fewer[index][:, stage] -= 1
                assert memory.peak_bytes(recompute_chunks(plain, fewer))[lanes].max() > budget
    assert some.remade


def test_modules_on_one_stage_keep_what_fits_together() -> None:
    ranks = [[[0]]]
    layout = Layout((placed(VISION, ranks), placed(LLM, ranks)), 4)
    memory = Memory(MODEL)
    plain = program_of(layout)
    peak, least = memory.peak_bytes(plain).max(), memory.peak_bytes(recompute_all(plain)).max()
    for share in (0.25, 0.5, 0.75):
        budget = float(least + share * (peak - least))
        some, _ = by_stage(layout, budget)
        assert memory.peak_bytes(some).max() <= budget
        for index in range(2):
            if some.remade[index].any():
                fewer = [own.copy() for own in some.remade]
                fewer[index] -= 1
                assert memory.peak_bytes(recompute_chunks(plain, fewer)).max() > budget
