"""LPT by total time: replicas, widths, numbers of microbatches, and that programs fit memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.balancing.candidates import Candidate
from entrain_bench.balancing.interleaved import Interleaved
from entrain_bench.balancing.lpt import aligned_first, lpt_with_exchange
from entrain_bench.balancing.planning import place_chain
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.rank_groups import room_bytes, sample_costs
from entrain_bench.balancing.rounds import plane_layout
from entrain_bench.balancing.tuning import asked
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.program.assignment import check_assignment
from entrain_bench.program.layout import Layout
from entrain_bench.program.validate import check_program
from entrain_bench.specs.job import Degrees
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench_strategies.lpt import CROWDED, Line, Load, LongestFirst, count_microbatches, divide
from entrain_bench_strategies.lpt_widths import LongestFirstOnWidths, dealt, numbered
from support.builders import chain_layout, profile_of, random_samples, samples, tiny_job, tiny_model

MODEL = tiny_model()
WHOLE = [(len(module.layers),) for module in MODEL.modules]
ONE = Line(1, 1)
SEEDS = st.integers(0, 2**32 - 1)


def replicas(profile: Profile, dp: int) -> Layout:
    return place_chain(profile.job, Degrees(1, 1, 1, dp), WHOLE, (False, False), leading=False)


def groups(profile: Profile) -> Layout:
    return plane_layout(profile.job, 1, WHOLE, False, (False, False), 2)


def with_room(profile: Profile, layout: Layout, room: float) -> Profile:
    """The profile with a budget that leaves so much room for activations."""
    states = float(profile.memory.lane_state_bytes(layout).max())
    filled = room_bytes(layout, profile.for_job(replace(profile.job, memory_budget_bytes=2 * states)))
    share = filled / (profile.job.planning_budget_bytes / profile.job.memory_budget_bytes * 2 * states - states)
    budget = (states + room / share) * profile.job.memory_budget_bytes / profile.job.planning_budget_bytes
    return profile.for_job(replace(profile.job, memory_budget_bytes=budget))


def test_microbatches_by_hand() -> None:
    # 8 | 6, then 5 to 6 and 4 to 8: 12 and 11; the longest is the last.
    seconds = np.array([8.0, 6.0, 5.0, 4.0])
    assert divide(seconds, seconds, 2, ONE).tolist() == [1, 0, 0, 1]
    # Bytes count as well: two long samples part though both microbatches would take the same with them together.
    assert divide(np.array([2.0, 2.0, 2.0, 2.0]), np.array([9.0, 9.0, 1.0, 1.0]), 2, ONE).tolist() in (
        [0, 1, 1, 0],
        [0, 1, 0, 1],
    )
    assert divide(seconds, seconds, 9, ONE).tolist() == [3, 2, 1, 0]
    assert divide(np.zeros(0), np.zeros(0), 3, ONE).tolist() == []


def test_exchanges_know_what_buckets_have() -> None:
    # Alone 3 and 2 would part; with 3 in the first bucket both go to the second, and 3 | 5 stays: no move helps.
    cost = np.array([[2.0, 2.0], [1.0, 1.0]])
    assert lpt_with_exchange(cost, 2, np.array([[3.0, 3.0], [0.0, 0.0]])).tolist() == [1, 1]
    # LPT: 6 to the empty one, 5 to that with 4, 4 to 6: 9 and 10. Nothing moves 4, which is there already.
    cost = np.array([[6.0, 6.0], [5.0, 5.0], [4.0, 4.0]])
    assert lpt_with_exchange(cost, 2, np.array([[4.0, 4.0], [0.0, 0.0]])).tolist() == [1, 0, 1]


def test_groups_are_aligned_and_wait_for_their_busiest_rank() -> None:
    width = np.array([1, 2, 2, 4])
    first, load = aligned_first(np.arange(4), width, np.array([5.0, 2.0, 3.0, 1.0]), 4)
    assert first.tolist() == [0, 2, 2, 0]
    assert load.tolist() == [6.0, 6.0, 6.0, 6.0]


def test_a_long_sample_is_as_wide_as_it_needs_to_be_by_hand() -> None:
    # 8 + 6 x 1 over four ranks is 3.5 each. The long one takes 2.5 on all four; the others 1 or 2 of a rank's seconds.
    seconds = np.array([[8.0, *[1.0] * 6], [4.5, *[0.8] * 6], [2.5, *[0.7] * 6]])
    level, first = dealt(seconds, np.array([1, 2, 4]), 4)
    assert level.tolist() == [2, 0, 0, 0, 0, 0, 0]
    assert first[0] == 0
    assert sorted(np.bincount(first[1:], minlength=4).tolist()) == [1, 1, 2, 2]
    # Where the narrowest does not fit it is wider, however little it takes.
    seconds[0, 1] = np.inf
    assert dealt(seconds, np.array([1, 2, 4]), 4)[0].tolist() == [2, 1, 0, 0, 0, 0, 0]


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(1, 7), st.integers(1, 3))
def test_replicas_are_near_the_best_of_all_deals(seed: int, count: int, dp: int) -> None:
    shapes = random_samples(np.random.default_rng(seed), count)
    profile = profile_of(tiny_job(MODEL, global_batch=6, microbatch_size=1), shapes)
    layout = replicas(profile, dp)
    (seconds,), _, _ = sample_costs(shapes, layout, profile, spread=False)
    labels = LongestFirst().assign(shapes, layout, profile)
    check_assignment(labels, MODEL, layout, shapes)
    vision, llm = labels.modules
    assert np.array_equal(vision.replica, llm.replica[shapes.item_sample])
    loads = [np.bincount(deal, seconds, dp).max() for deal in product(range(dp), repeat=count)]
    # Graham, 1969; exchanges never lengthen it.
    assert np.bincount(llm.replica, seconds, dp).max() <= min(loads) * (4 / 3 - 1 / (3 * dp)) * (1 + 1e-6)


def test_total_time_counts_encoders_and_both_passes() -> None:
    shapes = samples((100, [400]), (100, []), (10, [400]))
    profile = profile_of(tiny_job(MODEL), shapes)
    (seconds,), bytes_, _ = sample_costs(shapes, replicas(profile, 2), profile, spread=False)
    assert seconds[0] > max(seconds[1], seconds[2])
    assert bytes_[0] > max(bytes_[1], bytes_[2])
    # Stages share a sample's time, and its bytes.
    (piped,), piped_bytes, _ = sample_costs(shapes, chain_layout(MODEL, 1, 2, 4), profile, spread=False)
    assert piped == pytest.approx(seconds)
    assert np.all(piped_bytes < bytes_)


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.floats(0.5, 20.0), st.sampled_from([None, ()]))
def test_microbatches_need_at_most_what_recomputation_can_make_up_for(
    seed: int, scale: float, recompute: tuple[str, ...] | None
) -> None:
    rng = np.random.default_rng(seed)
    profile = profile_of(tiny_job(MODEL), random_samples(rng, 32))
    layout = replicas(profile, 4)
    profile = with_room(profile, layout, 1e6)
    assert room_bytes(layout, profile) == pytest.approx(1e6)
    request = replace(profile.job.request, recompute=recompute)
    profile = profile.for_job(replace(profile.job, request=request))
    seconds = rng.uniform(0.1, 2.0, 4)
    bytes_ = rng.uniform(0.1, 1.0, 4) * scale * 1e6
    counts = count_microbatches(Load(seconds, bytes_, np.full(4, 64), seconds / 9), 1e-3, layout, profile)
    crowded = bytes_ / counts / 1e6
    assert crowded.max() <= (1.0 if recompute == () else CROWDED) * (1 + 1e-6)
    # More are never needed than fit without recomputation.
    assert np.all(counts <= np.maximum(np.ceil(bytes_ / 1e6 - 1e-6), 1))
    # No microbatch is empty, however little room there is.
    few = np.array([1, 2, 3, 0])
    counts = count_microbatches(Load(seconds, 1e12 * bytes_, few, seconds / 9), 1e-3, layout, profile)
    assert np.all(counts <= np.maximum(few, 1))


def test_the_number_of_microbatches_weighs_recomputation_against_fixed_time_and_hidden_traffic() -> None:
    profile = profile_of(tiny_job(MODEL), random_samples(np.random.default_rng(0), 32))
    layout = replicas(profile, 4)
    profile = with_room(profile, layout, 1e6)
    step_s = [profile.programs.step_s(replace(layout, num_microbatches=count)) for count in (1, 2)]
    more_s = max(step_s[1] - step_s[0], 0.0) + 1.0
    # A batch of 1.25 rooms recomputes a fifth in one microbatch: a fifteenth of its time.
    seconds = 15 * more_s * np.array([0.9, 1.1])
    bytes_ = np.array([1.25e6, 1.25e6])
    load = Load(seconds, bytes_, np.full(2, 8), seconds / 9)
    assert count_microbatches(load, 1.0, layout, profile).tolist() == [1, 2]


def test_a_pipeline_has_as_many_microbatches_as_its_fill_is_worth() -> None:
    profile = profile_of(tiny_job(MODEL), random_samples(np.random.default_rng(0), 32))
    layout = chain_layout(MODEL, 1, 1, 4, dp=2)
    depth = Line.of(layout, MODEL).depth

    def best(seconds: float, fixed_s: float, longest_s: float) -> int:
        load = Load(np.array([seconds]), np.ones(1), np.array([16]), np.array([longest_s]))
        return int(count_microbatches(load, fixed_s, layout, profile)[0])

    # m microbatches of 1 s besides take (64 + m + (depth - 1) (64 / m + 1)) / depth seconds.
    assert best(64.0, 1.0, 4.0) == min(range(1, 17), key=lambda m: m + (depth - 1) * 64 / m)
    assert best(64.0, 0.0, 4.0) == 16
    # Fill and drain are as long as the longest sample in any case.
    assert best(64.0, 1.0, 16.0) == 4
    order = divide(np.arange(1.0, 6.0), np.ones(5), 5, Line(2, 1))
    assert order.tolist() == [0, 4, 1, 3, 2]
    # Interleaved, the last takes the last place of a whole group.
    assert divide(np.arange(1.0, 4.0), np.ones(3), 4, Line(2, 2)).max() == 3


@settings(max_examples=20, deadline=None)
@given(SEEDS, st.floats(0.3, 1.5))
def test_programs_fit_memory_on_replicas_and_on_groups_where_single_samples_do_not(seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    shapes = with_long(rng)
    profile = profile_of(tiny_job(MODEL), shapes)
    layout = groups(profile)
    _, bytes_, _ = sample_costs(shapes, layout, profile, spread=False)
    # The long sample needs several ranks.
    profile = with_room(profile, layout, scale * float(bytes_.max()) / CROWDED)
    labels = LongestFirstOnWidths().assign(shapes, layout, profile)
    check_assignment(labels, MODEL, layout, shapes)
    llm = layout.modules[-1]
    width = np.array([cp for _, cp in llm.degrees])[llm.degree_of_copy[labels.modules[-1].replica]]
    longest = int(bytes_.argmax())
    assert width[longest] >= 1 / scale
    program = Interleaved(memory="greedy").schedule(shapes, layout, labels, profile)
    check_program(program)
    assert profile.memory.peak_bytes(program).max() <= profile.job.memory_budget_bytes


def with_long(rng: np.random.Generator) -> SampleShapes:
    rows = [(int(rng.integers(1, 128)), rng.integers(1, 128, rng.integers(0, 3)).tolist()) for _ in range(31)]
    return samples(*rows, (4000, [2000]))


@settings(max_examples=20, deadline=None)
@given(SEEDS)
def test_ranks_have_several_microbatches_in_the_last_round_alone(seed: int) -> None:
    shapes = with_long(np.random.default_rng(seed))
    profile = profile_of(tiny_job(MODEL), shapes)
    layout = groups(profile)
    llm = layout.modules[-1]
    labels = LongestFirstOnWidths("shared").assign(shapes, layout, profile).modules[-1]
    level = llm.degree_of_copy[labels.replica]
    group = labels.replica - np.concatenate(([0], np.cumsum(llm.num_groups)))[level]
    held: dict[tuple[int, int], tuple[int, int]] = {}
    for one, wide, place in zip(group.tolist(), level.tolist(), labels.microbatch.tolist(), strict=True):
        for rank in range(one << wide, (one + 1) << wide):
            is_last = place == labels.microbatch.max()
            assert is_last or held.setdefault((rank, place), (wide, one)) == (wide, one)
    assert level.max() > 0


def test_narrow_groups_come_first_and_the_last_round_may_be_one_for_all_by_hand() -> None:
    # Two narrow groups, the first of two microbatches, and a wide one on both ranks.
    group = np.array([0, 1, 2, 0])
    ranks = [slice(0, 1), slice(1, 2), slice(0, 2)]
    places = [np.array([0, 1]), np.array([0]), np.array([0])]
    assert numbered(group, ranks, places, shares_last=False).tolist() == [0, 0, 2, 1]
    assert numbered(group, ranks, places, shares_last=True).tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("last_round", ["own", "shared"])
def test_ranks_that_meet_in_every_backward_never_share_a_round(last_round: str) -> None:
    shapes = with_long(np.random.default_rng(0))
    profile = profile_of(tiny_job(MODEL), shapes)
    layout = groups(profile)
    sharded = replace(layout, modules=tuple(replace(placed, sharding="zero2") for placed in layout.modules))
    dealer = LongestFirstOnWidths(last_round)
    rounds = [dealer.assign(shapes, one, profile).modules[-1].microbatch.max() for one in (layout, sharded)]
    assert rounds[0] + (last_round == "shared") == rounds[1]


def test_layouts_of_one_stage_are_offered_once_whatever_the_number_of_microbatches() -> None:
    profile = profile_of(tiny_job(MODEL, global_batch=16), random_samples(np.random.default_rng(0), 16))
    jobs = [profile.job.with_microbatch_size(size) for size in (1, 2)]

    def candidates(sized: Profile) -> list[Candidate]:
        return [Candidate(1.0, replicas(sized, 8))]

    assert len(asked(profile, jobs, [candidates], 2, [])) == 2
    (offer,) = asked(profile, jobs, [candidates], 2, [], chosen_number=True)
    assert offer.layout.is_one_stage
    assert not chain_layout(MODEL, 1, 1, 2).is_one_stage


def test_widths_are_needed() -> None:
    shapes = samples(*[(10, [40])] * 8)
    profile = profile_of(tiny_job(MODEL), shapes)
    with pytest.raises(IncompatibleError, match=r"lpt_widths needs groups of several widths"):
        LongestFirstOnWidths().assign(shapes, replicas(profile, 2), profile)
