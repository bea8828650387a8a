"""The Megatron-style baselines: the fastest homogeneous layout by estimate, and the rigid one by hand."""

from __future__ import annotations

from itertools import combinations, pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.balancing.interface import MakeProgram, Strategy
from entrain_bench.balancing.interleaved import Interleaved
from entrain_bench.balancing.planning import average_layer_s, partition_layers, place_chain, spread_blocks, stage_sums
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.errors import OutOfMemoryError, UserError
from entrain_bench.program import Program
from entrain_bench.program.layout import Layout, check_layout, layout_to_json
from entrain_bench.specs.job import Degrees, Job, LayoutRequest
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench_strategies.megatron import ArrivalOrder, LayerCosts, MegatronPlanner, ends_split
from entrain_bench_strategies.megatron_rigid import RigidPlanner
from support.builders import GIB, PlainPrograms, plan_with, profile_of, samples, tiny_cluster, tiny_job, tiny_model
from support.disttrain import generating

MODEL = tiny_model(encoder=3, llm=4)
ROW = (300, [1000, 200])
# Embedding and head beside the blocks: 3 + 2 and 6 + 2 layers.
RIGID = tiny_model(encoder=3, llm=6)
ROWS = [(300, [1000, 200])] * 4


def profile_for(*rows: tuple[int, list[int]], budget_bytes: float = 16 * GIB, **request: int) -> Profile:
    job = tiny_job(MODEL, tiny_cluster(1, 8), request=LayoutRequest(**request), budget_bytes=budget_bytes)
    return profile_of(job, samples(*rows))


def splits(costs: list[float], stages: int) -> list[list[float]]:
    """Stage times of every way to cut consecutive layers into stages."""
    rows = []
    for cuts in combinations(range(1, len(costs)), stages - 1):
        rows.append([sum(costs[lo:hi]) for lo, hi in pairwise((0, *cuts, len(costs)))])
    return rows


def best_stages(profile: Profile, degrees: Degrees, placement: str) -> float:
    """Least 1F1B time of average microbatches over every split and allowed placement, without recomputation."""
    vision, llm = (c.tolist() for c in average_layer_s(profile, profile.samples.draw(4), degrees.tp, degrees.cp))
    count = profile.job.num_microbatches(degrees.dp)
    found = []
    if placement != "leading_stages":
        rows = [[sum(vision) + first, *rest] for first, *rest in splits(llm, degrees.pp)]
        found += [sum(row) + (count - 1) * max(row) for row in rows]
    if placement != "first_stage":
        for stages in range(1, degrees.pp):
            for ahead in splits(vision, stages):
                found += [
                    sum(ahead) + sum(row) + (count - 1) * max(ahead + row) for row in splits(llm, degrees.pp - stages)
                ]
    return min(found, default=float("inf"))


@pytest.mark.wide
@pytest.mark.parametrize("placement", ["auto", "first_stage", "leading_stages"])
@pytest.mark.parametrize("row", [(300, [1000, 200]), (2000, [64]), (10, [6000])])
@pytest.mark.parametrize(
    "asked", [{"tp": 1, "cp": 1, "dp": 2}, {"tp": 2, "cp": 1, "dp": 1}, {"tp": 1, "cp": 1, "dp": 4}]
)
def test_the_best_estimate_is_of_every_split_and_placement(
    placement: str, row: tuple[int, list[int]], asked: dict[str, int]
) -> None:
    profile = profile_for(row, **asked)
    layout = plan_with(MegatronPlanner(placement, profile_samples=4, num_trials=1), profile)
    vision, llm = layout.modules
    check_layout(layout, MODEL, profile.job.cluster)
    leading = int(llm.ranks.min()) > 0
    assert placement == "auto" or leading == (placement == "leading_stages")
    degrees = Degrees(llm.tp, llm.cp, llm.pp + vision.pp * leading, llm.dp)
    costs = [c.tolist() for c in average_layer_s(profile, profile.samples.draw(4), degrees.tp, degrees.cp)]
    times = []
    for cost, place in zip(costs, (vision, llm), strict=True):
        bounds = np.cumsum((0, *place.layers_per_stage))
        times.append([sum(cost[lo:hi]) for lo, hi in pairwise(bounds)])
    chain = [*times[0], *times[1]] if leading else [times[0][0] + times[1][0], *times[1][1:]]
    seconds = sum(chain) + (layout.num_microbatches - 1) * max(chain)
    # The step at the end of the iteration differs between placements; it is small against the tolerance here.
    steps = profile.programs.step_s(layout)
    assert seconds <= best_stages(profile, degrees, placement) * (1 + 1e-9) + steps
    assert [vision.recompute, llm.recompute] == [False, False]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(3, 9))
def test_of_every_number_of_encoder_stages_the_fastest_split_of_the_rest(seed: int, pp: int) -> None:
    """Against every number of generator stages, each module split as ``partition_layers`` does."""
    model = generating(encoder=2, llm=3, generator=2)
    rng = np.random.default_rng(seed)
    costs = [rng.integers(0, 9, len(module.layers)).astype(float) for module in model.modules]
    found = [
        [*map(len, layers)]
        for layers, leading in MegatronPlanner("leading_stages")._splits(
            model, pp, 1, LayerCosts(model, tuple(costs), pp)
        )
        if leading
    ]
    slowest = {
        counts: max(
            stage_sums(cost, partition_layers(cost, stages)).max() for cost, stages in zip(costs, counts, strict=True)
        )
        for counts in product(*(range(1, len(cost) + 1) for cost in costs))
        if sum(counts) == pp
    }
    expected = []
    for ahead in sorted({counts[0] for counts in slowest}):
        behind = sorted((counts for counts in slowest if counts[0] == ahead), key=lambda counts: counts[2])
        expected.append([*min(behind, key=lambda counts: slowest[counts])])
    assert found == expected


def test_trials_decide_among_schedules_each_with_as_many() -> None:
    profile = profile_for(ROW, tp=1, cp=1, dp=2)
    # All samples are alike, so a profiled batch is as any other.
    batch, names = (
        profile.samples._source.batch(0, profile.job.global_batch, 0),
        ["1f1b", "interleaved", "zb_h1", "zb_v"],
    )

    def plan(chosen: list[str]) -> tuple[float, set[str]]:
        """Seconds of the layout that is taken, and the layouts that were looked at."""
        planner, asked = MegatronPlanner(profile_samples=4, num_trials=2, schedules=chosen), set[str]()
        programs = MakeProgram(Strategy("megatron", planner, ArrivalOrder(), Interleaved()), profile)

        @PlainPrograms
        def make_program(shapes: SampleShapes, layout: Layout) -> Program:
            asked.add(layout_to_json(layout))
            return programs(shapes, layout)

        return profile.trial_s(programs(batch, planner.plan(profile, make_program))), asked

    each = [plan([name]) for name in names]
    seconds, asked = plan(names)
    assert seconds == min(own for own, _ in each)
    assert asked == set().union(*(own for _, own in each))
    assert [len(own) for _, own in each] == [2] * 4


def test_blocks_that_cannot_be_spread_are_named() -> None:
    with pytest.raises(UserError, match=r"virtual_stages=3 split=uniform: the 4 blocks of llm cannot be spread"):
        plan_with(MegatronPlanner(profile_samples=4, split="uniform", virtual_stages=3), profile_for(ROW, pp=2, tp=1))


def test_tp_that_does_not_divide_the_heads_is_named() -> None:
    with pytest.raises(UserError, match=r"layout\.tp=8: must divide the 4"):
        plan_with(MegatronPlanner(profile_samples=4), profile_for(ROW, tp=8))


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8])
def test_stages_but_for_the_ends_are_the_fastest_of_all_that_have_as_many_layers(stages: int) -> None:
    model = tiny_model(encoder=3, llm=8)
    rng = np.random.default_rng(stages)
    costs = LayerCosts(model, (rng.random(5), rng.random(10)), stages)
    vision_s, llm_s = costs.layer_s
    loaded = llm_s.copy()
    loaded[0] += vision_s.sum()
    every = {
        (1 + first, *[middle] * (stages - 2), 1 + last) if stages > 1 else (10,)
        for first, middle, last in product(range(1, 9), repeat=3)
        if stages == 1 or first + middle * (stages - 2) + last == 8
    }
    fastest = min(stage_sums(loaded, layers).max() for layers in every)
    found = ends_split(costs.loaded_s, stages)
    assert found in every
    assert stage_sums(loaded, found).max() == pytest.approx(fastest)
    assert ends_split(costs.loaded_s, 9) is None


def test_stages_of_experts_are_balanced_by_memory_where_those_of_equal_time_do_not_fit() -> None:
    # Blocks with experts take at most twice as long as dense ones, because two of 128 experts work, but weigh far more.
    experts = {"count": 128, "top_k": 2, "ffn_hidden_size": 128, "dense_layers": [0, 1, 2, 3]}
    model = tiny_model(encoder=0, llm=8, experts=experts)
    request = LayoutRequest(tp=1, cp=1, pp=2, dp=1, ep=1)

    def planned_within(budget_bytes: float) -> tuple[tuple[int, ...], Profile]:
        job = tiny_job(model, tiny_cluster(1, 2), microbatch_size=1, request=request, budget_bytes=budget_bytes)
        profile = profile_of(job, samples((4096, [])))
        layout = plan_with(MegatronPlanner(profile_samples=4, num_trials=1, split="ends"), profile)
        return layout.modules[0].layers_per_stage, profile

    by_time, profile = planned_within(16 * GIB)
    states = {
        layers: float(profile.memory.lane_state_bytes(chain(profile.job, layers)).max())
        for layers in ((first, 10 - first) for first in range(2, 9))
    }
    by_memory = min(states, key=lambda layers: states[layers])
    assert states[by_time] > states[by_memory]
    assert planned_within(states[by_time])[0] == by_memory


def chain(job: Job, layers: tuple[int, ...]) -> Layout:
    """A language model alone in a pipeline of one replica."""
    return place_chain(job, Degrees(1, 1, len(layers), 1), [layers], [False], leading=False)


def planned(model: ModelSpec = RIGID, budget_bytes: float = 16 * GIB, request: Any = None, **options: Any) -> Layout:
    job = tiny_job(model, tiny_cluster(1, 8), request=LayoutRequest(**(request or {})), budget_bytes=budget_bytes)
    return plan_with(RigidPlanner(**options), profile_of(job, samples(*ROWS)))


def layers_of(layout: Layout) -> list[tuple[int, ...]]:
    return [module.layers_per_stage for module in layout.modules]


def test_blocks_are_spread_evenly_and_the_first_stages_take_what_is_left() -> None:
    assert spread_blocks(8, 3) == (3, 2, 3)
    assert spread_blocks(9, 3) == (4, 2, 3)
    assert spread_blocks(10, 3) == (4, 3, 3)
    assert spread_blocks(8, 7) is None
    assert spread_blocks(8, 1) == (8,)


def test_the_encoder_has_the_first_stage_to_itself() -> None:
    layout = planned(request={"tp": 1, "dp": 2})
    # Four stages: one of the encoder, three of two blocks each.
    assert layers_of(layout) == [(5,), (3, 2, 3)]
    assert layout.modules[0].ranks.tolist() == [[[0]], [[4]]]
    assert layout.modules[1].ranks.tolist() == [[[1], [2], [3]], [[5], [6], [7]]]


def test_the_encoder_is_on_the_first_llm_stage_or_on_as_many_as_are_asked_for() -> None:
    first = planned(request={"tp": 1, "dp": 2}, placement="first_stage")
    assert layers_of(first) == [(5,), (3, 2, 1, 2)]
    assert first.modules[0].ranks.tolist() == [[[0]], [[4]]]
    two = planned(request={"tp": 1, "dp": 2}, outer_stages=2)
    assert layers_of(two) == [(3, 2), (4, 4)]


def test_open_degrees_follow_rules_of_thumb() -> None:
    # Four heads: TP 4 at most. On the first LLM stage the encoder needs no second one, of its own it does.
    first, own = planned(placement="first_stage"), planned()
    assert [(each.tp, each.cp, each.pp, each.dp) for each in first.modules] == [(4, 1, 1, 2)] * 2
    assert [(each.tp, each.cp, each.pp, each.dp) for each in own.modules] == [(4, 1, 1, 1)] * 2


@pytest.mark.wide
def test_as_memory_shrinks_what_is_tried_last_is_recomputation_with_most_stages() -> None:
    # Two stages without recomputation need no less here: the first keeps the activations of two microbatches.
    found: list[tuple[int, bool]] = []
    for step in range(200):
        try:
            llm = planned(budget_bytes=3e9 * 0.96**step, request={"tp": 1}, placement="first_stage").modules[1]
        except OutOfMemoryError:
            break
        if found[-1:] != [(llm.pp, llm.recompute)]:
            found.append((llm.pp, llm.recompute))
    assert found == [(1, False), (1, True), (2, True)]


def test_stages_that_blocks_cannot_fill_are_named() -> None:
    with pytest.raises(UserError, match=r"cannot be spread evenly over 4 stages \(tp=1 cp=1\)"):
        planned(outer_stages=5, request={"tp": 1, "dp": 2})


def interleaved(model: ModelSpec = RIGID, **options: Any) -> Layout:
    job = tiny_job(model, tiny_cluster(1, 8), request=LayoutRequest(tp=1, dp=4))
    planner = RigidPlanner("interleaved", **options)
    return Strategy("rigid", planner, ArrivalOrder(), Interleaved()).plan(profile_of(job, samples(*ROWS)))


def test_chunks_of_equal_parameters_go_round_the_ranks() -> None:
    # Two ranks, two chunks each: four chunks of a quarter of the parameters, as nearly as layers allow. The LLM's ends
    # have 128,000 each, its blocks 147,712; the encoder's five layers together less than one of them.
    layout = interleaved()
    vision, llm = layout.modules
    parameters = [sum(layer.parameters for layer in module.layers) for module in RIGID.modules]
    assert 0 < parameters[0] < 147_712
    assert [layer.parameters for layer in RIGID.llm.layers][:2] == [128_000, 147_712]
    # 128,000 + 147,712 with the encoder on top; then two blocks each twice, and the last block with the head.
    assert layers_of(layout) == [(5,), (2, 2, 2, 2)]
    assert vision.ranks[0].tolist() == [[0]]
    assert llm.ranks[0].tolist() == [[0], [1], [0], [1]]


def test_a_large_encoder_has_chunks_of_its_own() -> None:
    layout = interleaved(tiny_model(encoder=40, llm=2))
    vision, llm = layout.modules
    assert sum(vision.layers_per_stage) == 42
    assert sum(llm.layers_per_stage) == 4
    assert vision.pp > 1
    shared = vision.ranks[0, -1].tolist() == llm.ranks[0, 0].tolist()
    assert vision.pp + llm.pp == 4 + shared
