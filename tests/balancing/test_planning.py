"""Building blocks of planners: brute force for partitions and shares, and placement worked by hand."""

import warnings
from collections.abc import Iterator
from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.balancing.planning import (
    Island,
    gpus_to_stages,
    partition_layers,
    partitions,
    place_chain,
    place_islands,
    proportional_allocation,
    slowest_stages_s,
    stage_sums,
)
from entrain_bench.balancing.schedules import chain_program, stages_behind
from entrain_bench.base.errors import UserError
from entrain_bench.program.assignment import same_microbatches
from entrain_bench.program.layout import Layout
from entrain_bench.program.validate import check_program
from entrain_bench.simulate import place_actions
from entrain_bench.specs.job import Degrees, Job, LayoutRequest
from entrain_bench.specs.model import ModelSpec
from support.builders import (
    TOKENS,
    encoder_config,
    llm_config,
    no_delay,
    placed,
    random_samples,
    samples,
    tiny_cluster,
    tiny_job,
    tiny_model,
)

MODEL = tiny_model(encoder=2, llm=4)


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to write a total as an ordered sum of positive parts."""
    for cuts in combinations(range(1, total), parts - 1):
        bounds = (0, *cuts, total)
        yield tuple(high - low for low, high in pairwise(bounds))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data())
def test_partition_has_the_fastest_slowest_stage(costs: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    layer_s = np.array(costs, np.float64)
    split = partition_layers(layer_s, stages)
    assert partitions(layer_s)[stages - 1] == split
    assert sum(split) == len(costs)
    assert len(split) == stages
    assert min(split) >= 1

    def slowest(layers: tuple[int, ...]) -> float:
        bounds = np.cumsum((0, *layers))
        return max(sum(costs[lo:hi]) for lo, hi in pairwise(bounds))

    assert slowest(split) == min(map(slowest, compositions(len(costs), stages)))
    assert stage_sums(layer_s, split).max() == slowest(split)
    assert stage_sums(layer_s, split).sum() == sum(costs)
    assert slowest_stages_s(layer_s)[stages - 1] == slowest(split)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(UserError, match="3 layers cannot fill 4 stages"):
        partition_layers(np.ones(3), 4)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_allocation_is_the_nearest_in_least_squares(data: st.DataObject) -> None:
    shares = data.draw(st.lists(st.integers(0, 100), min_size=1, max_size=4).filter(any))
    most = data.draw(st.lists(st.integers(1, 8), min_size=len(shares), max_size=len(shares)))
    total = data.draw(st.integers(len(shares), sum(most)))
    given = proportional_allocation(total, np.array(shares, np.float64), most)
    due = np.array(shares) / sum(shares) * total

    def error(counts: tuple[int, ...]) -> float:
        return float(((np.array(counts) - due) ** 2).sum())

    feasible = [c for c in compositions(total, len(shares)) if all(n <= m for n, m in zip(c, most, strict=True))]
    assert given in feasible
    assert error(given) == pytest.approx(min(map(error, feasible)), abs=1e-9)


@pytest.mark.parametrize(
    ("gpus", "width", "stages"),
    [
        # arXiv:2605.27918, appendix A.
        ((9, 7), 2, (4, 4)),
        ((7, 9), 2, (3, 5)),
        ((7, 9), 4, (1, 3)),
        ((16,), 2, (8,)),
    ],
)
def test_gpus_become_stages_in_favour_of_the_llm(gpus: tuple[int, ...], width: int, stages: tuple[int, ...]) -> None:
    assert gpus_to_stages(gpus, width) == stages


def test_modules_without_any_work_share_evenly_and_quietly() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert proportional_allocation(4, np.zeros(2)) == (2, 2)


@pytest.mark.parametrize(("total", "most"), [(1, None), (6, [3, 2])])
def test_stages_that_cannot_be_shared_are_refused(total: int, most: list[int] | None) -> None:
    with pytest.raises(UserError, match=f"cannot split {total} stages among modules"):
        proportional_allocation(total, np.ones(2), most)


def test_place_chain_puts_tp_innermost_and_replicas_outermost() -> None:
    job = tiny_job(MODEL, tiny_cluster(2, 8))
    degrees = Degrees(tp=2, cp=1, pp=4, dp=2)
    layout = place_chain(job, degrees, [(4,), (2, 2, 2)], (True, False), leading=True)
    vision, llm = layout.modules
    assert vision.ranks.tolist() == [[[0, 1]], [[8, 9]]]
    assert llm.ranks.tolist() == [[[2, 3], [4, 5], [6, 7]], [[10, 11], [12, 13], [14, 15]]]
    assert (vision.recompute, llm.recompute) == (True, False)
    assert layout.num_microbatches == 32 // (2 * 2)
    assert layout.num_lanes == 8
    assert set(layout.lane_width) == {2}


def test_place_chain_puts_encoders_on_the_first_llm_stage() -> None:
    job = tiny_job(MODEL, tiny_cluster(1, 4))
    layout = place_chain(job, Degrees(1, 1, 2, 2), [(4,), (3, 3)], (False, False), leading=False)
    vision, llm = layout.modules
    assert vision.ranks.tolist() == [[[0]], [[2]]]
    assert llm.ranks.tolist() == [[[0], [1]], [[2], [3]]]


def brute_force_degrees(job: Job) -> set[tuple[int, int, int, int]]:
    ranks, asked = job.cluster.num_ranks, job.request
    sizes = [
        size
        for m in job.model.modules
        for size in (m.config.num_heads, m.config.num_kv_heads, m.config.ffn_hidden_size)
    ]
    most = max(len(m.layers) for m in job.model.encoders) + len(job.model.llm.layers)
    found = set()
    for tp, cp, pp, dp in product(range(1, ranks + 1), repeat=4):
        ok = tp * cp * pp * dp == ranks and pp <= most
        ok &= job.cluster.gpus_per_node % tp == 0 and all(size % tp == 0 for size in sizes)
        ok &= (cp & (cp - 1)) == 0
        ok &= job.global_batch % (dp * job.microbatch_size) == 0
        ok &= all(
            want is None or want == have
            for want, have in zip((asked.tp, asked.cp, asked.pp, asked.dp), (tp, cp, pp, dp), strict=True)
        )
        if ok:
            found.add((tp, cp, pp, dp))
    return found


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 1), (1, 4), (2, 4), (1, 6), (3, 4), (1, 8)])
@pytest.mark.parametrize(
    "asked", [{}, {"tp": 2}, {"cp": 2}, {"dp": 2}, {"pp": 2}, {"tp": 2, "dp": 2}, {"pp": 3, "cp": 1}]
)
def test_degrees_are_all_that_use_every_rank_and_meet_the_request(nodes: int, gpus: int, asked: dict[str, int]) -> None:
    job = tiny_job(MODEL, tiny_cluster(nodes, gpus), global_batch=24, microbatch_size=2, request=LayoutRequest(**asked))
    expected = brute_force_degrees(job)
    if not expected:
        with pytest.raises(UserError, match=r"layout|must be"):
            list(job.degrees())
        return
    found = [(d.tp, d.cp, d.pp, d.dp) for d in job.degrees()]
    assert len(found) == len(set(found))
    assert set(found) == expected


def test_tensor_parallelism_may_split_the_llm_only() -> None:
    vision = encoder_config(num_heads=2, num_kv_heads=2, head_dim=32)
    modules = {"vision": vision, "llm": llm_config(vocab_size=1001)}
    job = tiny_job(ModelSpec.from_config({"name": "handmade", "modules": modules, "tokens": TOKENS}))
    # 2 heads of the encoder, 4 key-value heads of the LLM, whose odd vocabulary can be padded.
    assert {degrees.tp for degrees in job.degrees()} == {1, 2}
    assert {degrees.tp for degrees in job.degrees(of_llm=True)} == {1, 2, 4}


PAIR = tiny_model(encoder=2, llm=2)
LAYERS = [len(module.layers) for module in PAIR.modules]


def test_islands_are_consecutive_and_the_widest_tensor_parallelism_comes_first() -> None:
    job = tiny_job(PAIR, tiny_cluster(2, 8))
    layout = place_islands(job, [Island(1, 1, 3, (LAYERS[0],)), Island(2, 1, 2, (1, LAYERS[1] - 1))], 4)
    assert layout.modules[1].ranks.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert layout.modules[0].ranks.tolist() == [[[8]], [[9]], [[10]]]
    assert layout.num_microbatches == 4


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 5),
)
def test_any_two_degrees_of_data_parallelism_form_a_chain(
    seed: int, encoder_dp: int, llm_dp: int, encoder_pp: int, llm_pp: int, count: int
) -> None:
    rng = np.random.default_rng(seed)
    split = [(*[1] * (pp - 1), layers - pp + 1) for pp, layers in zip((encoder_pp, llm_pp), LAYERS, strict=True)]
    job = tiny_job(PAIR, tiny_cluster(4, 8))
    layout = place_islands(job, [Island(1, 1, encoder_dp, split[0]), Island(1, 1, llm_dp, split[1])], count)
    shapes = random_samples(rng, 4 * count, longest=500)
    size = len(shapes)
    microbatch = rng.integers(0, count, size)
    assignment = same_microbatches(
        PAIR, shapes, rng.integers(0, llm_dp, size), microbatch, microbatch, rng.integers(0, encoder_dp, size)
    )
    program = chain_program(PAIR, shapes, layout, assignment, stages_behind(layout))
    check_program(program)
    _, end, _ = place_actions(program, np.ones(program.num_actions), no_delay(program))
    assert np.all(np.isfinite(end))


def test_an_encoder_replica_that_feeds_two_llm_replicas_serves_both_each_microbatch() -> None:
    layout = Layout((placed(PAIR.modules[0], [[[0]]]), placed(PAIR.modules[1], [[[1]], [[2]]])), 2)
    shapes = samples(*[(10, [40])] * 4)
    replica, microbatch = np.array([0, 1, 0, 1]), np.array([0, 0, 1, 1])
    assignment = same_microbatches(PAIR, shapes, replica, microbatch, microbatch, np.zeros(4, np.int64))
    program = chain_program(PAIR, shapes, layout, assignment, stages_behind(layout))
    assert len(program.chunks[0]) == 2
    start, end, _ = place_actions(program, np.ones(program.num_actions), no_delay(program))
    encoder, llm = program.forward_actions(0), program.forward_actions(1)
    # rank 0: F0 F1 .  B0 B1 ;  rank 1 and 2: . F0 B0 F1 B1
    assert start[encoder].ravel().tolist() == [0, 1]
    assert start[llm].ravel().tolist() == [1, 3, 1, 3]
    assert start[program.backward_actions(0)].ravel().tolist() == [3, 5]
    assert end.max() == 8.0, "two unit steps follow the last backward"
