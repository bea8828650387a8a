"""DistTrain: orchestration, both reorderings and brokers against brute force and hand-worked cases."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import sliding_window_view

from entrain_bench.arrays import FloatArray, IntArray
from entrain_bench.errors import IncompatibleError, UserError
from entrain_bench.experiment import run_experiment
from entrain_bench.program.assignment import Assignment
from entrain_bench.program.layout import Layout
from entrain_bench.program.validate import check_program
from entrain_bench.run import compose_cells
from entrain_bench.simulate import place_actions
from entrain_bench.specs.job import LayoutRequest
from entrain_bench.strategy.interface import Strategy
from entrain_bench.strategy.planning import Island, place_islands
from entrain_bench.strategy.profile import Profile
from entrain_bench_strategies.disttrain import DistTrainAssigner, DistTrainPlanner, DistTrainScheduler
from entrain_bench_strategies.disttrain.assigner import position_within, stage_shares, unit_replicas
from entrain_bench_strategies.disttrain.orchestration import GroupLoad, Options, best_integers, iteration_s, solve
from entrain_bench_strategies.disttrain.planner import Orchestration, SubProblem
from entrain_bench_strategies.disttrain.reordering import balanced_groups, interval_order
from support.builders import (
    chain_layout,
    labels,
    no_delay,
    placed,
    profile_of,
    random_samples,
    samples,
    tiny_cluster,
    tiny_job,
    tiny_model,
)

MODEL = tiny_model(encoder=4, llm=6)


def plan(profile: Profile, **knobs: object) -> Layout:
    return Strategy("disttrain", DistTrainPlanner(**knobs), DistTrainAssigner(), DistTrainScheduler()).plan(profile)  # type: ignore[arg-type]


# Intra-microbatch reordering


def best_makespan(size: FloatArray, groups: int, capacity: int) -> float:
    """Least heaviest group over every way to deal the samples out, capacity samples each."""
    if groups == 1:
        return float(size.sum())
    rest = range(1, len(size))
    best = np.inf
    for others in combinations(rest, capacity - 1):
        chosen = [0, *others]
        left = np.delete(size, chosen)
        best = min(best, max(float(size[chosen].sum()), best_makespan(left, groups - 1, capacity)))
    return best


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 3), st.integers(1, 3))
def test_lpt_with_equal_counts_is_within_its_bound(seed: int, groups: int, capacity: int) -> None:
    size = np.random.default_rng(seed).pareto(1.0, groups * capacity)
    group = balanced_groups(size, groups)
    assert np.bincount(group, minlength=groups).tolist() == [capacity] * groups
    # Two a group: optimal. Three a group: 4/3 - 1/(3 m) (Kellerer and Woeginger, 1993).
    bound = 1.0 if capacity <= 2 else 4 / 3 - 1 / (3 * groups)
    got = np.bincount(group, weights=size).max()
    assert got <= bound * best_makespan(size, groups, capacity) * (1 + 1e-12)


def test_lpt_by_hand_and_samples_without_work_are_dealt_out() -> None:
    # 9 -> 0, 7 -> 1, 6 -> 1 (full at two), 1 -> 0.
    assert balanced_groups(np.array([1.0, 6.0, 9.0, 7.0]), 2).tolist() == [0, 1, 0, 1]
    assert balanced_groups(np.zeros(4), 2).tolist() == [0, 1, 0, 1]


# Inter-microbatch reordering


def first_stage_idle(forward: FloatArray, backward: FloatArray, prefix: list[int], number: int) -> float:
    """Time from the first stage's previous backward (or first forward) to the arrival of backward ``number``.

    Replays 1F1B from scratch over what the prefix determines, action by action.
    """
    stages = forward.shape[1]
    queues = []
    for stage in range(stages):
        warm = stages - 1 - stage
        queue = [("F", m) for m in range(warm)]
        for m in range(number + 1):
            queue += [("F", m + warm), ("B", m)]
        queues.append(queue)
    end: dict[tuple[str, int, int], float] = {}
    free = [0.0] * stages
    moved = True
    while moved:
        moved = False
        for stage, queue in enumerate(queues):
            while queue:
                kind, m = queue[0]
                if kind == "F" and m >= len(prefix):
                    break
                if kind == "F":
                    need = ("F", stage - 1, m) if stage else None
                    seconds = forward[prefix[m], stage]
                else:
                    need = ("B", stage + 1, m) if stage < stages - 1 else ("F", stage, m)
                    seconds = backward[prefix[m], stage]
                if need is not None and need not in end:
                    break
                begin = max(free[stage], end[need] if need else 0.0)
                free[stage] = end[kind, stage, m] = begin + seconds
                queue.pop(0)
                moved = True
    return end["B", 1, number] - end["B", 0, number - 1]


def least_miss(rising: FloatArray, number: int, target: float) -> float:
    """Distance from the target to the best sum of ``number`` neighbours with one of them swapped at most."""
    runs = sliding_window_view(rising, number).sum(axis=1) if number else np.zeros(1)
    first = int(np.abs(runs - target).argmin())
    swaps = np.delete(rising, slice(first, first + number)) - rising[first : first + number, None]
    return float(np.abs(runs[first] + np.append(swaps, 0.0) - target).min())


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 5), st.integers(1, 24), st.sampled_from([1.0, 3.0]))
def test_every_pick_fits_its_interval_best(seed: int, stages: int, count: int, first: float) -> None:
    rng = np.random.default_rng(seed)
    forward, backward = rng.uniform(0.1, 5, (count, stages)), rng.uniform(0.1, 9, (count, stages))
    # With a slow first stage, its forwards of the warm-up hold backwards up.
    forward[:, 0] *= first
    order = interval_order(forward, backward)
    assert sorted(order) == list(range(count))
    rising = np.argsort(forward.sum(axis=1))
    rear = min(stages - 1, count - 1)
    assert order[0] == rising[0]
    assert order[count - rear :].tolist() == rising[1 : 1 + rear].tolist()
    middle = count - rear
    interval, number = forward[order[0], 1:].sum() + backward[order[0], 1:].sum(), min(stages, middle) - 1
    miss = abs(forward[order[1 : 1 + number], 0].sum() - interval)
    assert miss == pytest.approx(least_miss(np.sort(forward[order[1:middle], 0]), number, interval))
    for at in range(stages, middle):
        idle = first_stage_idle(forward, backward, order[:at].tolist(), at - stages + 1)
        left = order[at:middle]
        misses = np.abs(forward[left, 0] - idle)
        assert misses[0] == pytest.approx(misses.min())


def test_interval_filling_by_hand() -> None:
    # Two stages, backward twice the forward. Microbatches by first-stage forward: 1, 2, 3, 4, 6; stage 1 takes 1 each.
    forward = np.array([[4.0, 1], [1, 1], [6, 1], [2, 1], [3, 1]])
    backward = 2 * forward
    # First: the smallest (1). Rear: the next smallest (2). Interval 1: stage 1 forward 1 and backward 2 = 3 -> the 3.
    # Stage 0: F 0-1, F 1-4, B(1) arrives at 4, 4-6. Stage 1: B(1) 2-4, F(3) 4-5, B(3) 5-7 -> idle 7 - 6 = 1 -> the 4.
    # Then the 6 alone is left.
    assert interval_order(forward, backward).tolist() == [1, 4, 0, 2, 3]
    # B(3) 5-11 -> idle 11 - 6 = 5, between the 4 and the 6 -> the smaller.
    backward[4, 1] = 6.0
    assert interval_order(forward, backward).tolist() == [1, 4, 0, 2, 3]
    forward[0, 0] = 3.9
    assert interval_order(forward, backward).tolist() == [1, 4, 2, 0, 3]


@pytest.mark.parametrize("unit", [1.0, 2.0**-20])
def test_a_warm_up_with_a_slow_first_stage_by_hand(unit: float) -> None:
    forward = np.array([[1.0, 4, 1], [9, 3, 2], [5, 3, 2], [7, 2, 3], [4, 3, 4], [6, 2, 4], [2, 3, 3]])
    backward = np.tile([1.0, 3, 4], (7, 1))
    # First: 0. Rear: 6 and 2. Interval 1: 4 + 1 forward, 3 + 4 backward = 12; of 4, 6, 7 and 9 the 6 and the 7.
    # Stage 0: F0 0-1, F5 1-7, F3 7-14, then B0, which arrives at 13, 14-15.
    # Stage 1: F0 1-5, F5 7-9, B0 10-13, F3 14-16, B5 18-21. Stage 2: F0 5-6, B0 6-10, F5 10-14, B5 14-18.
    # Idle 21 - 15 = 6 -> the 4, then the 9 that is left.
    assert interval_order(unit * forward, unit * backward).tolist() == [0, 5, 3, 4, 1, 6, 2]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 4), st.integers(2, 9))
def test_the_order_does_not_depend_on_the_unit_of_time(seed: int, stages: int, count: int) -> None:
    forward, backward = np.random.default_rng(seed).integers(1, 99, (2, count, stages)).astype(np.float64)
    # A power of two leaves every digit.
    scaled = interval_order(forward / 2**20, backward / 2**20)
    assert interval_order(forward, backward).tolist() == scaled.tolist()


def test_one_stage_keeps_the_order() -> None:
    assert interval_order(np.array([[3.0], [1.0]]), np.array([[6.0], [2.0]])).tolist() == [0, 1]


# The assigner


def disjoint(encoder_dp: int, llm_dp: int, count: int) -> Layout:
    islands = [Island(1, 1, encoder_dp, (3, 3)), Island(1, 1, llm_dp, (4, 4))]
    return place_islands(tiny_job(MODEL, tiny_cluster(8, 8)), islands, count)


def by_replica(replica: IntArray) -> list[list[int]]:
    return [np.flatnonzero(replica == r).tolist() for r in range(int(replica.max()) + 1)]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["none", "microbatch", "global_batch"]), st.integers(1, 4))
def test_inter_reordering_permutes_microbatches_and_nothing_else(seed: int, intra: str, count: int) -> None:
    shapes = random_samples(np.random.default_rng(seed), 4 * count * 2)
    layout = disjoint(2, 4, count)
    profile = profile_of(tiny_job(MODEL, global_batch=len(shapes), microbatch_size=2), shapes)
    plain = DistTrainAssigner(intra, inter=False).assign(shapes, layout, profile).modules[-1]
    moved = DistTrainAssigner(intra, inter=True).assign(shapes, layout, profile).modules[-1]
    assert by_replica(plain.replica) == by_replica(moved.replica)
    sets = [
        {
            frozenset(np.flatnonzero((a.replica == r) & (a.microbatch == m)).tolist())
            for r in range(4)
            for m in range(count)
        }
        for a in (plain, moved)
    ]
    assert sets[0] == sets[1]
    assert all(len(members) == 2 for members in sets[0])


@pytest.mark.parametrize("intra", ["microbatch", "global_batch"])
def test_intra_reordering_evens_the_encoder_work_out(intra: str) -> None:
    shapes = random_samples(np.random.default_rng(3), 64, longest=4000)
    layout, profile = disjoint(4, 4, 8), profile_of(tiny_job(MODEL, global_batch=64), shapes)
    spread = []
    for scope in ("none", intra):
        replica = DistTrainAssigner(scope).assign(shapes, layout, profile).modules[-1].replica
        encoder, _ = profile.estimate_samples(shapes, 1, 1)
        spread.append(np.ptp(np.bincount(replica, weights=encoder)))
    assert spread[1] < 0.5 * spread[0]


def test_more_encoder_replicas_than_the_llms_are_balanced_one_by_one() -> None:
    shapes = random_samples(np.random.default_rng(8), 64, longest=4000)
    layout, profile = disjoint(4, 2, 16), profile_of(tiny_job(MODEL, global_batch=64), shapes)
    spread = []
    for scope in ("none", "global_batch"):
        labels = DistTrainAssigner(scope).assign(shapes, layout, profile).modules[0]
        work = np.bincount(labels.replica, weights=profile.estimate_units(MODEL.modules[0], shapes, 1, 1), minlength=4)
        spread.append(np.ptp(work))
    assert spread[1] < 0.2 * spread[0]


def test_microbatches_of_one_column_stay_in_their_column() -> None:
    shapes = random_samples(np.random.default_rng(5), 32)
    profile = profile_of(tiny_job(MODEL, global_batch=32), shapes)
    labels = DistTrainAssigner("microbatch", inter=False).assign(shapes, disjoint(4, 4, 4), profile).modules[-1]
    assert np.array_equal(labels.microbatch, np.arange(32) // 8)


@pytest.mark.parametrize(
    ("encoder_dp", "llm_dp", "expected"),
    [
        (2, 4, [0, 0, 0, 0, 1, 1, 1, 1]),
        (4, 2, [0, 0, 1, 1, 2, 2, 3, 3]),
        (3, 2, [0, 0, 0, 1, 1, 1, 2, 2]),
        (6, 4, [0, 0, 1, 2, 3, 3, 4, 5]),
    ],
)
def test_brokers_join_and_split_in_order(encoder_dp: int, llm_dp: int, expected: list[int]) -> None:
    replica = np.arange(8) // (8 // llm_dp)
    zero = np.zeros(8, np.int64)
    layout = disjoint(encoder_dp, llm_dp, 1)
    found = unit_replicas(replica, zero, position_within(replica), layout, slice(0, 1), llm=1)
    assert found is not None
    assert found.tolist() == expected


def test_stage_shares_add_up_and_count_recomputation() -> None:
    layout = disjoint(1, 1, 4)
    profile = profile_of(tiny_job(MODEL), samples((10, [40])))
    encoder, llm = stage_shares(layout, profile)
    for share in (encoder, llm):
        assert share.sum(axis=1).tolist() == pytest.approx([1.0, 2.0])
    assert np.all(encoder[0, 2:] == 0)
    assert np.all(llm[0, :2] == 0)
    again = Layout(
        (placed(MODEL.modules[0], np.array([[[0]]]), recompute=True), placed(MODEL.modules[1], np.array([[[1]]]))), 4
    )
    assert stage_shares(again, profile)[0].sum(axis=1).tolist() == pytest.approx([1.0, 3.0])


def test_unknown_scope_is_refused() -> None:
    with pytest.raises(UserError, match=r"strategy\.assigner\.intra=globl_batch: unknown"):
        DistTrainAssigner("globl_batch")


# Different DP of encoder and LLM


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([(1, 4), (2, 4), (4, 4), (4, 2), (3, 2)]), st.integers(1, 5))
def test_different_dp_runs_to_the_end(seed: int, dps: tuple[int, int], count: int) -> None:
    encoder_dp, llm_dp = dps
    shapes = random_samples(np.random.default_rng(seed), 2 * llm_dp * count)
    layout = disjoint(encoder_dp, llm_dp, count)
    profile = profile_of(tiny_job(MODEL, global_batch=len(shapes)), shapes)
    assignment = DistTrainAssigner().assign(shapes, layout, profile)
    program = DistTrainScheduler().schedule(shapes, layout, assignment, profile)
    check_program(program)
    _, end, _ = place_actions(program, np.ones(program.num_actions), no_delay(program))
    assert np.all(np.isfinite(end))


def test_modules_that_share_ranks_with_different_dp_are_incompatible() -> None:
    layout = Layout((placed(MODEL.modules[0], [[[0]], [[1]]]), placed(MODEL.modules[1], [[[0], [1]]])), 1)
    shapes = samples((10, [40]), (10, [40]))
    profile = profile_of(tiny_job(MODEL, global_batch=2), shapes)
    with pytest.raises(IncompatibleError, match="share ranks"):
        DistTrainScheduler().schedule(shapes, layout, DistTrainAssigner().assign(shapes, layout, profile), profile)


# Orchestration


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.01, 100), st.integers(1, 12), st.integers(0, 250)), min_size=2, max_size=2),
    st.integers(24, 200),
    st.integers(1, 200),
)
def test_the_convex_solution_is_as_good_as_a_fine_grid(
    groups: list[tuple[float, int, int]], num_gpus: int, num_steps: int
) -> None:
    loads = [
        GroupLoad(work, least, least + extra, fills=index == 0) for index, (work, least, extra) in enumerate(groups)
    ]
    gpus = solve(loads, num_gpus, num_steps)
    assert gpus is not None
    assert gpus.sum() <= num_gpus * (1 + 1e-15)
    assert all(load.fewest <= x <= load.most for x, load in zip(gpus, loads, strict=True))
    low, high = loads[0].fewest, min(loads[0].most, num_gpus - loads[1].fewest)
    for _ in range(5):  # every time around the best place of the grid before
        grid = np.linspace(low, high, 2001)
        encoder, llm = loads[0].gpu_s / grid, loads[1].gpu_s / np.minimum(loads[1].most, num_gpus - grid)
        seconds = encoder + (num_steps - 1) * np.maximum(encoder, llm)
        at, width = grid[seconds.argmin()], (high - low) / 2000
        low, high = max(low, at - 2 * width), min(high, at + 2 * width)
    assert iteration_s(loads, gpus, num_steps) <= float(seconds.min()) * (1 + 1e-12)


def test_a_problem_that_a_general_solver_misses() -> None:
    # SLSQP ended 5% off. The backbone is slow whatever it gets: all but one GPU go to the only group that warms up.
    gpus = solve([GroupLoad(0.5, 1, 145, fills=False), GroupLoad(25.0, 1, 145)], 145, 1)
    assert gpus is not None
    assert gpus.tolist() == pytest.approx([1.0, 144.0], rel=1e-14)


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e6])
def test_the_solution_does_not_depend_on_the_unit_of_time(unit: float) -> None:
    # One step: only the warm-up counts, x_1 / x_2 = sqrt(w_1 / w_2); the backbone keeps what it needs at least.
    gpus = solve([GroupLoad(unit, 1, 60), GroupLoad(9 * unit, 1, 60), GroupLoad(unit, 4, 60, fills=False)], 44, 1)
    assert gpus is not None
    assert gpus.tolist() == pytest.approx([10.0, 30.0, 4.0], rel=1e-12)


def test_units_without_work_and_too_few_gpus() -> None:
    idle = [GroupLoad(0.0, 2, 8), GroupLoad(0.0, 3, 8, fills=False)]
    gpus = solve(idle, 8, 4)
    assert gpus is not None
    assert all(load.fewest <= x <= load.most for x, load in zip(gpus, idle, strict=True))
    assert solve(idle, 4, 4) is None
    assert solve([GroupLoad(1.0, 3, 2)], 8, 4) is None
    only = solve([GroupLoad(1.0, 1, 6)], 8, 4)
    assert only is not None
    assert only.tolist() == [6.0]


def test_three_units_are_solved_like_two() -> None:
    loads = [GroupLoad(3.0, 1, 60), GroupLoad(6.0, 2, 60, fills=False), GroupLoad(1.0, 1, 60)]
    gpus = solve(loads, 60, 20)
    assert gpus is not None
    best = min(
        iteration_s(loads, np.array([x, 60.0 - x - z, z]), 20)
        for x, z in product(np.linspace(1, 57, 225), np.linspace(1, 57, 225))
        if 60 - x - z >= 2
    )
    assert iteration_s(loads, gpus, 20) <= best * (1 + 1e-3)


def test_bounds_are_kept_and_too_little_is_refused() -> None:
    loads = [GroupLoad(1.0, 10, 64), GroupLoad(50.0, 1, 20, fills=False)]
    gpus = solve(loads, 64, 32)
    assert gpus is not None
    assert gpus[0] >= 10
    assert gpus[1] == pytest.approx(20)
    assert solve(loads, 10, 32) is None


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 20), st.booleans())
def test_the_best_integers_are_those_of_brute_force(seed: int, num_units: int, num_steps: int, asked: bool) -> None:
    rng = np.random.default_rng(seed)
    groups = []
    for _ in range(num_units):
        dp, pp = rng.integers(1, 4, (2, 6))
        fill = rng.integers(1, 9, 6).astype(float)
        groups.append(Options(dp, pp, dp * pp, fill, fill / rng.integers(1, 4, 6)))
    total = int(rng.integers(num_units, 4 * num_units)) if asked else None
    expected = []
    for at in product(range(6), repeat=num_units):
        chosen = [group.take(np.array([i])) for group, i in zip(groups, at, strict=True)]
        if sum(int(c.ranks[0]) for c in chosen) <= 12 and total in (None, sum(int(c.pp[0]) for c in chosen)):
            slowest = max(float(c.slowest_s[0]) for c in chosen)
            expected.append(sum(float(c.fill_s[0]) for c in chosen) + (num_steps - 1) * slowest)
    found = best_integers(groups, 12, num_steps, 3, total)
    assert [seconds for seconds, _ in found] == pytest.approx(sorted(expected)[:3])
    if not asked and found:
        few = best_integers([group.undominated() for group in groups], 12, num_steps, 1)
        assert few[0][0] == pytest.approx(found[0][0])


def profile_for(*rows: tuple[int, list[int]], ranks: int = 8, **request: int) -> Profile:
    return profile_of(tiny_job(MODEL, tiny_cluster(1, ranks), request=LayoutRequest(**request)), samples(*rows))


@pytest.mark.parametrize("request_", [{"tp": 1, "dp": 1}, {"tp": 1, "dp": 2}, {"tp": 2, "dp": 1}, {"tp": 1}, {}])
@pytest.mark.parametrize("row", [(2000, [200]), (200, [6000])])
def test_rounding_finds_the_best_integers(row: tuple[int, list[int]], request_: dict[str, int]) -> None:
    """Best-first search over bounded sub-problems against every TP, DP and PP."""
    profile = profile_for(row, **request_)
    problem = Orchestration(profile, profile.draw(1))
    found, *_ = next(problem.points(list(problem.problems()), keep=1))
    best = np.inf
    size = profile.job.microbatch_size
    for dp, tps in product(problem.backbone_dps(), product(problem.tps(0), problem.tps(1))):
        for encoder_dp, pe, pl in product(problem.dps(0, dp), range(1, 7), range(1, 9)):
            if tps[0] * encoder_dp * pe + tps[1] * dp * pl > 8:
                continue
            encoder, llm = problem.stage_s(0, tps[0], pe), problem.stage_s(1, tps[1], pl)
            share = dp / encoder_dp
            seconds = share * encoder[0] + llm[0]
            seconds += (profile.job.num_microbatches(dp) - 1) * max(share * encoder[1], llm[1])
            best = min(best, size * seconds)
    assert found == pytest.approx(best)


def test_the_encoders_dp_divides_the_backbones_or_splits_its_microbatches_evenly() -> None:
    def space(**request: int) -> Orchestration:
        job = tiny_job(MODEL, tiny_cluster(), global_batch=48, microbatch_size=6, request=LayoutRequest(**request))
        profile = profile_of(job, samples((2000, [200])))
        return Orchestration(profile, profile.draw(1), requests_bind_encoder=False)

    free = space()
    assert free.backbone_dps() == [1, 2, 4, 8]
    assert free.dps(0, 4) == [1, 2, 4, 8, 12, 24]
    assert free.dps(1, 4) == [4]
    asked = space(dp=2)
    assert asked.backbone_dps() == [2]
    assert asked.dps(0, 2) == [1, 2, 4, 6, 12]
    assert replace(asked, requests_bind_encoder=True).dps(0, 2) == [2]


def test_a_sub_problem_is_bounded_by_perfect_division() -> None:
    profile = profile_for((2000, [200]))
    space = Orchestration(profile, profile.draw(1))
    # 4 LLM replicas of TP 2, recomputed, encoders of TP 1; microbatches of 2 samples, 8 GPUs, 32 / (4 x 2) steps.
    vision_s, llm_s = space.module_s(0, 1), space.module_s(1, 2) * 4 / 3
    step_s = (1 * 4 * 2 * vision_s + 2 * 4 * 2 * llm_s) / 8
    problem = SubProblem(4, (1, 2), (False, True))
    assert space.least_s(problem) == pytest.approx(2 * llm_s + 3 * step_s, rel=1e-12)
    for problem in space.problems():
        optimum = space.solve(problem)
        assert optimum is None or space.least_s(problem) <= optimum * (1 + 1e-12)
        for seconds, _ in space.rounded(problem, 1):
            assert optimum is not None
            # Seconds of points are rounded (decisive).
            assert max(optimum, space.least_s(problem)) <= seconds * (1 + 1e-8)


def test_the_fewest_gpus_hold_states_and_a_step_in_flight() -> None:
    rows = (2000, [200, 400]), (1000, [])
    profile = profile_for(*rows)
    space = Orchestration(profile, samples(*rows))
    problem, room = SubProblem(2, (1, 1), (False, True)), profile.job.planning_budget_bytes
    vision, llm = MODEL.modules
    # Two replicas' microbatches of two samples, of 300 encoder tokens on average.
    kept = 2 * 2 * 300 * sum(layer.activation_bytes_per_token for layer in vision.layers)
    assert space._fewest(problem, 0, 1, True) == pytest.approx((space.state_bytes(0, 1, 1) + kept) / room, rel=1e-12)
    # The recomputed backbone's inputs, of 1575 tokens on average with what the encoder hands over, leave less room.
    room -= 2 * 2 * 1575 * sum(layer.input_bytes_per_token for layer in llm.layers) / 2
    assert space._fewest(problem, 1, 2, True) == pytest.approx(space.state_bytes(1, 1, 2) / room, rel=1e-12)


def test_requests_bind() -> None:
    layout = plan(profile_for((500, [2000]), tp=1, dp=2, pp=4))
    assert [(m.tp, m.dp) for m in layout.modules] == [(1, 2), (1, 2)]
    assert sum(m.pp for m in layout.modules) == 4
    assert np.array_equal(layout.modules[0].ranks[1, 0], layout.modules[1].ranks[0, -1] + 1), "replicas are consecutive"
    free = plan(profile_for((500, [20000]), tp=1, dp=2), requests_bind_encoder=False)
    assert (free.modules[1].tp, free.modules[1].dp) == (1, 2)


def test_an_impossible_request_says_why() -> None:
    with pytest.raises(UserError, match=r"layout\.tp=4 layout\.dp=4: no stages of encoder and LLM"):
        plan(profile_for((500, [2000]), tp=4, dp=4))
    with pytest.raises(UserError, match=r"layout\.tp=3: must be a divisor"):
        plan(profile_for((500, [2000]), tp=3))
    with pytest.raises(UserError, match=r"strategy\.planner\.profile_samples=0"):
        DistTrainPlanner(profile_samples=0)


def test_a_heavier_encoder_gets_more_ranks() -> None:
    few, many = (plan(profile_for(row, tp=1, dp=1)).modules[0].ranks.size for row in ((8000, [100]), (100, [8000])))
    assert many > few


def test_an_llm_microbatch_ahead_of_its_encoder_microbatch_is_refused() -> None:
    profile, (shapes, layout) = (
        profile_for((500, [200])),
        (samples((10, [40]), (10, []), (10, [40])), chain_layout(MODEL, 1, 1, 2)),
    )
    in_time = Assignment((labels([0, 0], [0, 1]), labels([0, 0, 0], [0, 0, 1])))
    DistTrainScheduler().schedule(shapes, layout, in_time, profile)
    early = Assignment((labels([0, 0], [0, 1]), labels([0, 0, 0], [1, 0, 0])))
    with pytest.raises(IncompatibleError, match="sample 2 is in llm microbatch 0, before its vision microbatch 1"):
        DistTrainScheduler().schedule(shapes, layout, early, profile)


def test_a_sample_without_items_is_drawn_again() -> None:
    profile = profile_for((500, []), (500, []), (500, []), (100, [8000]), tp=1, dp=1)
    assert plan(profile).modules[0].ranks.size > 1


def test_reordering_does_not_hurt_on_average() -> None:
    """Mean iteration time of 8 batches of opencqa_ocr with and without both reorderings, same layout."""
    cell = ["strategy=disttrain", "workload=opencqa_ocr", "iterations=8"]
    switched = {}
    for name, knobs in (("both", []), ("none", ["strategy.assigner.intra=none", "strategy.assigner.inter=false"])):
        outcome = run_experiment(compose_cells([*cell, *knobs])[0].config)
        switched[name] = outcome.metrics["iteration_time_s"]
    assert switched["both"] < switched["none"]
