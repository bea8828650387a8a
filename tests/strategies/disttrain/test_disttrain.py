"""DistTrain: orchestration, reordering and brokers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import sliding_window_view

from entrain_bench.balancing.lpt import place_in_group
from entrain_bench.balancing.planning import Island, place_islands
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.program.assignment import Assignment
from entrain_bench.program.layout import Layout
from entrain_bench.specs.job import LayoutRequest
from entrain_bench_strategies.disttrain import DistTrainAssigner, DistTrainScheduler
from entrain_bench_strategies.disttrain.assigner import interval_order, stage_shares, unit_replicas
from entrain_bench_strategies.disttrain.orchestration import (
    GroupLoads,
    best_integers,
    iteration_s,
    solve,
    undominated,
)
from entrain_bench_strategies.disttrain.planner import Orchestration, SubProblem, candidates, points
from support.builders import chain_layout, labels, placed, profile_of, random_samples, samples, tiny_cluster, tiny_job
from support.disttrain import MODEL, generating, profile_for

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


@pytest.mark.parametrize(("intra", "carry"), [("global_batch", False), ("microbatch", True), ("microbatch", False)])
def test_intra_reordering_evens_the_encoder_work_out(intra: str, carry: bool) -> None:
    """Over the batch; without carrying loads over, over each microbatch of all ranks."""
    shapes = random_samples(np.random.default_rng(3), 64, longest=4000)
    layout, profile = disjoint(4, 4, 8), profile_of(tiny_job(MODEL, global_batch=64), shapes)
    encoder, _ = profile.estimates.samples(shapes, 1, 1)
    alone = intra == "microbatch" and not carry
    spread = []
    for assigner in (DistTrainAssigner("none", inter=False), DistTrainAssigner(intra, inter=False, carry=carry)):
        labels = assigner.assign(shapes, layout, profile).modules[-1]
        row = labels.microbatch if alone else np.zeros(64, np.int64)
        work = np.bincount(4 * row + labels.replica, weights=encoder, minlength=4 * (row.max() + 1)).reshape(-1, 4)
        spread.append(float(np.ptp(work, axis=1).mean()))
    assert spread[1] < 0.5 * spread[0]


def test_more_encoder_replicas_than_the_llms_are_balanced_one_by_one() -> None:
    shapes = random_samples(np.random.default_rng(8), 64, longest=4000)
    layout, profile = disjoint(4, 2, 16), profile_of(tiny_job(MODEL, global_batch=64), shapes)
    spread = []
    for scope in ("none", "global_batch"):
        labels = DistTrainAssigner(scope).assign(shapes, layout, profile).modules[0]
        work = np.bincount(labels.replica, weights=profile.estimates.units(MODEL.modules[0], shapes, 1, 1), minlength=4)
        spread.append(np.ptp(work))
    assert spread[1] < 0.2 * spread[0]


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
    found = unit_replicas(replica, zero, place_in_group(replica), layout, slice(0, 1), llm=1)
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


# Different DP of encoder and LLM


def test_an_llm_microbatch_ahead_of_its_encoder_microbatch_is_refused() -> None:
    profile, (shapes, layout) = (
        profile_for((500, [200])),
        (samples((10, [40]), (10, []), (10, [40])), chain_layout(MODEL, 1, 1, 2)),
    )
    in_time = Assignment((labels([0, 0], [0, 1]), labels([0, 0, 0], [0, 0, 1])))
    DistTrainScheduler().schedule(shapes, layout, in_time, profile)
    early = Assignment((labels([0, 0], [0, 1]), labels([0, 0, 0], [1, 0, 0])))
    with pytest.raises(IncompatibleError, match="sample 2 is in vision microbatch 1 and already in llm microbatch 0"):
        DistTrainScheduler().schedule(shapes, layout, early, profile)


class GroupLoad(NamedTuple):
    """One group of a lone problem."""

    gpu_s: float
    fewest: float
    most: float
    fills: bool = True


def together(groups: Sequence[GroupLoad]) -> GroupLoads:
    gpu_s, fewest, most, fills = np.array(groups, np.float64).T
    return GroupLoads(gpu_s[None], fewest[None], most[None], fills > 0)


def solved(groups: Sequence[GroupLoad], num_gpus: int, num_steps: int) -> FloatArray | None:
    gpus = solve(together(groups), num_gpus, num_steps)[0]
    return None if np.isnan(gpus).any() else gpus


def seconds_of(groups: Sequence[GroupLoad], gpus: FloatArray, num_steps: int) -> float:
    return float(iteration_s(together(groups), gpus[None], num_steps)[0])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.01, 100), st.integers(1, 12), st.integers(0, 250)), min_size=2, max_size=2),
    st.integers(24, 200),
    st.integers(1, 200),
)
@example([(41.0, 7, 0), (1.0, 1, 0)], 24, 1).via("41 / (41 / 7) is more than 7")
def test_the_convex_solution_is_as_good_as_a_fine_grid(
    groups: list[tuple[float, int, int]], num_gpus: int, num_steps: int
) -> None:
    loads = [
        GroupLoad(work, least, least + extra, fills=index == 0) for index, (work, least, extra) in enumerate(groups)
    ]
    gpus = solved(loads, num_gpus, num_steps)
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
    assert seconds_of(loads, gpus, num_steps) <= float(seconds.min()) * (1 + 1e-12)


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e6])
def test_the_solution_does_not_depend_on_the_unit_of_time(unit: float) -> None:
    # One step: only the warm-up counts, x_1 / x_2 = sqrt(w_1 / w_2); the backbone keeps what it needs at least.
    gpus = solved([GroupLoad(unit, 1, 60), GroupLoad(9 * unit, 1, 60), GroupLoad(unit, 4, 60, fills=False)], 44, 1)
    assert gpus is not None
    assert gpus.tolist() == pytest.approx([10.0, 30.0, 4.0], rel=1e-12)


def test_units_without_work_and_too_few_gpus() -> None:
    idle = [GroupLoad(0.0, 2, 8), GroupLoad(0.0, 3, 8, fills=False)]
    gpus = solved(idle, 8, 4)
    assert gpus is not None
    assert all(load.fewest <= x <= load.most for x, load in zip(gpus, idle, strict=True))
    assert solved(idle, 4, 4) is None
    assert solved([GroupLoad(1.0, 3, 2)], 8, 4) is None
    only = solved([GroupLoad(1.0, 1, 6)], 8, 4)
    assert only is not None
    assert only.tolist() == [6.0]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 20), st.booleans())
def test_the_best_integers_are_those_of_brute_force(seed: int, num_units: int, num_steps: int, asked: bool) -> None:
    rng = np.random.default_rng(seed)
    groups = []
    for _ in range(num_units):
        dp, pp = rng.integers(1, 4, (2, 6))
        fill = rng.integers(1, 9, 6).astype(float)
        groups.append(np.stack([dp * pp, pp, fill, fill / rng.integers(1, 4, 6), dp]))
    total = int(rng.integers(num_units, 4 * num_units)) if asked else None
    expected = []
    for at in product(range(6), repeat=num_units):
        ranks, stages, fills, slowest, _ = zip(*(group[:, i] for group, i in zip(groups, at, strict=True)), strict=True)
        if sum(ranks) <= 12 and total in (None, sum(stages)):
            expected.append(sum(fills) + (num_steps - 1) * max(slowest))
    found = best_integers(groups, 12, num_steps, 3, total)
    assert [seconds for seconds, _ in found] == pytest.approx(sorted(expected)[:3])
    if not asked and found:
        few = best_integers([undominated(group) for group in groups], 12, num_steps, 1)
        assert few[0][0] == pytest.approx(found[0][0])


def first_point_s(space: Orchestration, problems: list[SubProblem], keep: int = 1) -> float:
    return next((seconds for seconds, solution in points(space, problems, keep) if solution), np.inf)


@pytest.mark.parametrize("request_", [{"tp": 1, "dp": 1}, {"tp": 1, "dp": 2}, {"tp": 2, "dp": 1}, {"tp": 1}, {}])
@pytest.mark.parametrize("row", [(2000, [200]), (200, [6000])])
def test_rounding_finds_the_best_integers(row: tuple[int, list[int]], request_: dict[str, int]) -> None:
    """Best-first search over bounded sub-problems against every TP, DP and PP."""
    profile = profile_for(row, **request_)
    space = Orchestration(profile, profile.samples.draw(1))
    found = min(first_point_s(space, problems) for problems in space.problems())
    best = np.inf
    size = profile.job.microbatch_size
    for dp, tps in product(space.backbone_dps(), product(space.tps(0), space.tps(1))):
        for encoder_dp, pe, pl in product(space.dps(0, dp), range(1, 7), range(1, 9)):
            if tps[0] * encoder_dp * pe + tps[1] * dp * pl > 8:
                continue
            encoder, llm = space.stage_s(0, tps[0])[:, pe - 1], space.stage_s(1, tps[1])[:, pl - 1]
            share = dp / encoder_dp
            seconds = share * encoder[0] + llm[0]
            seconds += (profile.job.num_microbatches(dp) - 1) * max(share * encoder[1], llm[1])
            best = min(best, size * seconds)
    assert found == pytest.approx(best)


def test_the_encoders_dp_divides_the_backbones_or_splits_its_microbatches_evenly() -> None:
    def space(**request: int) -> Orchestration:
        job = tiny_job(MODEL, tiny_cluster(), global_batch=48, microbatch_size=6, request=LayoutRequest(**request))
        profile = profile_of(job, samples((2000, [200])))
        return Orchestration(profile, profile.samples.draw(1), bound=LayoutRequest())

    free = space()
    assert free.backbone_dps() == [1, 2, 4, 8]
    assert free.dps(0, 4) == [1, 2, 4, 8, 12, 24]
    assert free.dps(1, 4) == [4]
    asked = space(dp=2)
    assert asked.backbone_dps() == [2]
    assert asked.dps(0, 2) == [1, 2, 4, 6, 12]
    assert replace(asked, bound=None).dps(0, 2) == [2]


@pytest.mark.parametrize("budget", [16, 0.01, 0.004])
def test_no_point_is_below_the_bounds(budget: float) -> None:
    """Perfect division, and the convex program with the memory of states; with activations the latter is no lower."""
    job = tiny_job(generating(), tiny_cluster(1, 8), budget_bytes=budget * 2**30)
    profile = profile_of(job, samples((2000, [200])))
    space = Orchestration(profile, profile.samples.draw(1))
    num_points = 0
    for problems in space.problems():
        states_s, held_s = space.solve(problems)
        least_s = space.least_s(problems)
        assert np.all(least_s <= states_s * (1 + 1e-12))
        assert np.all(states_s <= held_s * (1 + 1e-12))
        for problem, bound_s in zip(problems, states_s, strict=True):
            for seconds, _ in space.rounded(problem, 1):
                num_points += 1
                # Seconds of points are rounded (decisive).
                assert bound_s <= seconds * (1 + 1e-8)
    assert num_points > 40


@pytest.mark.wide
def test_candidates_come_in_the_order_of_a_search_that_leaves_nothing_out() -> None:
    """Every sub-problem rounded, every layout placed: of each backbone the next by rising optimum, then T, is next."""
    profile = profile_of(tiny_job(generating(), tiny_cluster(1, 8)), samples((2000, [200, 900])))
    space = Orchestration(profile, profile.samples.draw(1))
    waiting = []
    for problems in space.problems():
        optima = decisive(np.maximum(space.least_s(problems), space.solve(problems)[1]))
        some = []
        for problem, optimum in zip(problems, optima, strict=True):
            for seconds, point in space.rounded(problem, 3) if np.isfinite(optimum) else ():
                layout = space.place(problem, point)
                estimate = decisive(seconds + profile.programs.step_s(layout))
                some.append((max(float(optimum), seconds), seconds, estimate, layout))
        waiting.append(sorted(some, key=lambda entry: entry[:2]))
    expected = []
    while any(waiting):
        fastest = min((some for some in waiting if some), key=lambda some: some[0][2])
        expected.append(fastest.pop(0)[2:])
    found = [*candidates(space, 3)]
    assert [c.estimated_s for c in found] == [seconds for seconds, _ in expected]
    assert len({c.estimated_s for c in found[:20]}) == 20
    assert [c.layout.describe() for c in found[:20]] == [layout.describe() for _, layout in expected[:20]]


def test_the_fewest_gpus_hold_states_and_a_step_in_flight() -> None:
    rows = (2000, [200, 400]), (1000, [])
    profile = profile_for(*rows)
    space = Orchestration(profile, samples(*rows))
    room = profile.job.planning_budget_bytes
    vision, llm = MODEL.modules
    # Two replicas' microbatches of two samples, of 300 encoder tokens on average.
    kept = 2 * 2 * 300 * sum(layer.activation_bytes_per_token for layer in vision.layers)
    needed = space.state_bytes(0, 1, 1) + kept
    assert space.needed_gpus(0, 1, 2, False, True) == pytest.approx(needed / room, rel=1e-12)
    # The recomputed backbone's inputs, of 1575 tokens on average with what the encoder hands over, leave less room.
    room -= 2 * 2 * 1575 * sum(layer.input_bytes_per_token for layer in llm.layers) / 2
    assert space.needed_gpus(1, 1, 2, True, True) == pytest.approx(space.state_bytes(1, 1, 2) / room, rel=1e-12)
    # With TP 2 and DP 1, four of six stages fill the 8 GPUs.
    assert space.options(0, 2, 1, False)[0].tolist() == [2.0, 4.0, 6.0, 8.0]
    # One GPU of two replicas each, however little that holds.
    assert space.fewest([SubProblem(2, (1, 1), (False, True))], True).tolist() == [[1.0, 2.0]]


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
