"""Modules with a data parallelism of their own: disjoint chains and three-phase programs."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.balancing.planning import Island, place_islands
from entrain_bench.balancing.schedules import chain_program, stages_behind
from entrain_bench.program.assignment import same_microbatches
from entrain_bench.program.layout import Layout
from entrain_bench.program.validate import check_program
from entrain_bench.simulate import place_actions
from support.builders import no_delay, placed, random_samples, samples, tiny_cluster, tiny_job, tiny_model

MODEL = tiny_model(encoder=2, llm=2)
LAYERS = [len(module.layers) for module in MODEL.modules]


def test_islands_are_consecutive_and_the_widest_tensor_parallelism_comes_first() -> None:
    job = tiny_job(MODEL, tiny_cluster(2, 8))
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
    job = tiny_job(MODEL, tiny_cluster(4, 8))
    layout = place_islands(job, [Island(1, 1, encoder_dp, split[0]), Island(1, 1, llm_dp, split[1])], count)
    shapes = random_samples(rng, 4 * count, longest=500)
    size = len(shapes)
    microbatch = rng.integers(0, count, size)
    assignment = same_microbatches(
        MODEL, shapes, rng.integers(0, llm_dp, size), microbatch, microbatch, rng.integers(0, encoder_dp, size)
    )
    program = chain_program(MODEL, shapes, layout, assignment, stages_behind(layout))
    check_program(program)
    _, end, _ = place_actions(program, np.ones(program.num_actions), no_delay(program))
    assert np.all(np.isfinite(end))


def test_an_encoder_replica_that_feeds_two_llm_replicas_serves_both_each_microbatch() -> None:
    layout = Layout(
        (
            placed(MODEL.modules[0], np.array([[[0]]])),
            placed(MODEL.modules[1], np.array([[[1]], [[2]]])),
        ),
        2,
    )
    shapes = samples(*[(10, [40])] * 4)
    replica, microbatch = np.array([0, 1, 0, 1]), np.array([0, 0, 1, 1])
    assignment = same_microbatches(MODEL, shapes, replica, microbatch, microbatch, np.zeros(4, np.int64))
    program = chain_program(MODEL, shapes, layout, assignment, stages_behind(layout))
    assert len(program.chunks[0]) == 2
    start, end, _ = place_actions(program, np.ones(program.num_actions), no_delay(program))
    encoder, llm = program.forward_actions(0), program.forward_actions(1)
    # rank 0: F0 F1 .  B0 B1 ;  rank 1 and 2: . F0 B0 F1 B1
    assert start[encoder].ravel().tolist() == [0, 1]
    assert start[llm].ravel().tolist() == [1, 3, 1, 3]
    assert start[program.backward_actions(0)].ravel().tolist() == [3, 5]
    assert end.max() == 8.0, "two unit steps follow the last backward"
