"""Every second of every rank is in one class: by hand, in any program, and where something is planted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.balancing.schedules import chain_program, stages_behind
from entrain_bench.base.arrays import FloatArray
from entrain_bench.base.errors import DeadlockError
from entrain_bench.costs.bound import least_gpu_s
from entrain_bench.costs.truth import ActionNoise, CostTruth
from entrain_bench.program import ActionView, Pass, Program
from entrain_bench.program.assignment import same_microbatches
from entrain_bench.program.columns import covered_per_stage, recompute_chunks
from entrain_bench.program.layout import Layout
from entrain_bench.program.timeline import Timeline
from entrain_bench.records.time_shares import (
    EXPERT_SHARES,
    TIME_SHARES,
    OfExperts,
    fill_and_drain_s,
    remade_share,
    time_of_experts,
    time_shares,
)
from entrain_bench.simulate import Simulator, place_actions
from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.specs.model import ModelSpec
from support.builders import (
    TOKENS,
    chain_layout,
    durations,
    find,
    generating_model,
    llm_config,
    placed,
    rngs,
    samples,
    tiny_cluster,
    tiny_model,
    uniform_batch,
)
from support.programs import frameworks, random_layout, random_program

MODEL = tiny_model(encoder=0, llm=2)
BOTH = tiny_model(encoder=2, llm=2)


def pipeline(stages: int = 2, microbatches: int = 2, dp: int = 1) -> Program:
    layout = chain_layout(MODEL, 0, stages, microbatches, dp)
    shapes, assignment = uniform_batch(MODEL, microbatches, dp)
    return chain_program(MODEL, shapes, layout, assignment, stages_behind(layout))


def seconds_of(shares: dict[str, float], total_s: float) -> dict[str, float]:
    """GPU seconds of each class, without ``time_`` and ``_share``; those that have some."""
    found = {name[len("time_") : -len("_share")]: share * total_s for name, share in shares.items()}
    return {name: seconds for name, seconds in found.items() if seconds > 1e-9}


def test_two_stages_and_two_microbatches_by_hand() -> None:
    program = pipeline()
    start, end, comm, wait, remade = (np.zeros(program.num_actions) for _ in range(5))
    # Stage, pass, microbatch: start, end, wait for transfers. The second forward takes five times as long as the first.
    ran = {
        (0, Pass.FORWARD, 0): (0.5, 1.5, 0.5),  # gathers weights before anything runs: of the step
        (0, Pass.FORWARD, 1): (1.5, 6.5, 0.0),
        (0, Pass.BACKWARD, 0): (6.5, 8.5, 0.0),
        (0, Pass.BACKWARD, 1): (12.0, 14.0, 1.0),
        (1, Pass.FORWARD, 0): (2.0, 3.0, 0.5),
        (1, Pass.BACKWARD, 0): (3.0, 5.0, 0.0),
        (1, Pass.FORWARD, 1): (7.0, 8.0, 0.5),
        (1, Pass.BACKWARD, 1): (8.0, 11.0, 0.0),
    }
    for (stage, kind, unit), times in ran.items():
        action = find(program, "llm", kind, stage, [unit])
        start[action], end[action], wait[action] = times
        remade[action] = 0.25 if (stage, kind) == (0, Pass.BACKWARD) else 0.0
    comm[find(program, "llm", Pass.BACKWARD, 1, [1])] = 1.0
    start[program.first_action[-1] :], end[program.first_action[-1] :] = 15.0, 16.0
    timeline = Timeline(program, start, end, comm, wait, np.zeros(2))
    # To the second stage and back through mean passes of 3 s and 2 s: 13 s with its own 8, 2 s more than the first.
    assert fill_and_drain_s(timeline) == pytest.approx([0.0, 5.0])
    found = time_shares(timeline, 3, 10.0, remade)
    assert [*found] == [*TIME_SHARES]
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-12)
    assert seconds_of(found, 48.0) == pytest.approx(
        {
            "work": 10.0,
            "kernels": 5.0,  # 10 s and 7 s of passes, but for what follows
            "recompute": 1.0,  # a quarter of 2 s twice
            "comm": 3.0,  # 1 s inside, 0.5 s twice before the second stage, 1 s before the first
            "stages": 3.0,  # 11 s are taken of the first stage, 8 s of the second
            "microbatches": 1.0,  # 13.5 s are between first start and last end: 2.5 s, but for
            "pipeline": 4.0,
            "step": 5.0,
            "unused": 16.0,
        }
    )
    # Three quarters of the one second inside, and half of the 5 s of the second forward.
    of_experts = OfExperts(0.75 * comm, np.zeros(program.num_actions))
    of_experts.uneven[find(program, "llm", Pass.FORWARD, 0, [1])] = 0.5
    apart = time_shares(timeline, 3, 10.0, remade, of_experts)
    assert [*apart] == [*TIME_SHARES, *EXPERT_SHARES]
    changed = {"comm": 2.25, "exchange": 0.75, "kernels": 2.5, "experts": 2.5}
    assert seconds_of(apart, 48.0) == pytest.approx(seconds_of(found, 48.0) | changed)


def test_exchange_and_unequal_loads_of_experts_are_apart() -> None:
    def shares(**experts: float) -> dict[str, float]:
        routed = {"count": 8, "top_k": 2, "ffn_hidden_size": 32, "load_std": 0.0, **experts}
        modules = {"llm": llm_config(2, experts=routed)}
        model = ModelSpec.from_config({"name": "mixture", "modules": modules, "tokens": TOKENS})
        layout = chain_layout(model, 0, 1, 2, dp=8)
        layout = replace(layout, modules=(replace(layout.modules[0], ep=8),))
        shapes, assignment = uniform_batch(model, 2, dp=8)
        program = chain_program(model, shapes, layout, assignment, stages_behind(layout))
        truth = CostTruth(model, tiny_cluster(2, 4))
        timeline = Simulator(truth, 1e15).execute(program)
        experts_s = time_of_experts(truth, program)
        found = time_shares(timeline, 8, 0.0, remade_share(truth, program), experts_s)
        return seconds_of(found, 8 * timeline.iteration_time_s)

    even = shares()
    # Two blocks of two microbatches, both ways and in both passes: 10 tokens of 2 copies of 128 values of 2 bytes.
    # Half of them cross the network.
    one_s = 2 * (1e-6 + 2 * 2e-6 + 4 * 1e-5 + 2 * 128 * 2 * 10 * 4 / 8 / 1e8)
    assert even["exchange"] == pytest.approx(8 * 2 * 2 * 2 * one_s)
    assert "experts" not in even
    uneven = shares(load_std=1.0)
    assert uneven["kernels"] == pytest.approx(even["kernels"])
    assert uneven["experts"] > 0
    assert uneven["exchange"] > even["exchange"]


def test_chunks_go_through_all_that_is_before_a_stage_in_their_own_replica() -> None:
    model = generating_model()
    vision, llm, out = model.modules
    places = [[0, 1, 2, 3], [4, 5, 6, 7]]
    ranks = np.array(places).reshape(2, 4, 1)
    layout = Layout((placed(vision, ranks[:, :1]), placed(llm, ranks[:, 1:3]), placed(out, ranks[:1, 3:])), 2)
    shapes = samples(*[(10, [40])] * 4)
    replica, microbatch = np.array([0, 1, 0, 1]), np.array([0, 0, 1, 1])
    assignment = same_microbatches(model, shapes, replica, microbatch, microbatch, None, np.zeros(4, np.int64))
    program = chain_program(model, shapes, layout, assignment, stages_behind(layout))
    took = {"vision": 1.0, "llm": 10.0, "out": 100.0}
    seconds = durations(program, lambda view: took[view.module] * (1 + view.replica) * (1 + view.microbatch))
    nothing = np.zeros(program.num_actions)
    timeline = Timeline(program, nothing, seconds, nothing, nothing, np.zeros(layout.num_lanes))
    # Chunks of the first replica take 1.5 times as long on average, there and back; those of the second twice that.
    # The generator has one replica: it is reached through the mean of both, 1.5 times the first's.
    lead = dict(zip(layout.lane_first_rank.tolist(), fill_and_drain_s(timeline), strict=True))
    assert lead == pytest.approx({0: 0, 1: 3, 2: 33, 3: 1.5 * 63, 4: 0, 5: 6, 6: 66})


def test_what_is_recomputed_is_the_forward_of_the_layers_that_are() -> None:
    truth, program = CostTruth(MODEL, tiny_cluster()), pipeline()
    assert not remade_share(truth, program).any()
    times = truth.chunk_times(MODEL.llm, program.layout.modules[0], program.shapes, program.chunks[0])
    # A block on either stage, beside the embedding and the head.
    (block,) = (each for each in MODEL.llm.kinds if each.recomputed)
    loads = truth.layer_times.loads(MODEL.llm, program.shapes.llm_tokens[:1])
    alone_s = truth.layer_times.layers_s(MODEL.llm, loads, 1, 1)[[*MODEL.llm.kinds].index(block)].forward_s[0]
    every = replace(program, layout=chain_layout(MODEL, 0, 2, 2, recompute=True))
    share = remade_share(truth, every)[program.backward_actions(0)]
    assert share == pytest.approx(alone_s / (times.backward_s + alone_s))
    most = covered_per_stage(MODEL.llm, program.layout.modules[0].layers_per_stage)
    one = recompute_chunks(program, [np.array([[0, 0], most])])
    assert remade_share(truth, one)[program.backward_actions(0)] == pytest.approx(share * [[0], [1]])


# Something planted


def shares_with(program: Program, seconds: Callable[[ActionView], float], delay_s: float = 0.0) -> dict[str, float]:
    """Shares where passes take so long, and everything that travels the delay; all that is computed is needed."""
    took = durations(program, seconds)
    start, end, wait = place_actions(program, took, np.full(len(program.dep_actions), delay_s))
    timeline = Timeline(program, start, end, np.zeros(program.num_actions), wait, np.zeros(program.layout.num_lanes))
    found = time_shares(timeline, program.layout.num_ranks, float(took.sum()), np.zeros(program.num_actions))
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-12)
    return found


SLOW: dict[str, Callable[[ActionView], bool]] = {
    "replicas": lambda view: view.replica == 1,
    "stages": lambda view: view.stage == 2,
    # One microbatch on every stage, each another, so that neither ranks nor replicas differ.
    "microbatches": lambda view: view.microbatch == 2 * view.stage,
}


@pytest.mark.parametrize("cause", SLOW)
def test_what_is_planted_shows_in_its_class(cause: str) -> None:
    program = pipeline(4, 8, dp=2)
    even = shares_with(program, lambda _: 2.0)
    # 1F1B of 8 microbatches: 3 of 11 slots are filling and draining.
    assert seconds_of(even, 11.0) == pytest.approx({"work": 8.0, "pipeline": 3.0})
    slow = shares_with(program, lambda view: 4.0 if SLOW[cause](view) else 2.0)
    others = {name: slow[f"time_{name}_share"] for name in SLOW}
    assert max(others, key=lambda name: others[name]) == cause
    assert others[cause] > 0.1
    assert sum(others.values()) - others[cause] < 0.03


def test_transfers_are_communication_and_unequal_ranks_are_not() -> None:
    program = pipeline(4, 8)
    late = shares_with(program, lambda _: 2.0, delay_s=0.5)
    assert late["time_comm_share"] > 0.05
    layout = Layout((placed(MODEL.llm, [[[0]], [[1]]]),), 4)
    shapes, assignment = uniform_batch(MODEL, 4, dp=2)
    program = chain_program(MODEL, shapes, layout, assignment, stages_behind(layout))
    # 24 s on a rank, 8 s on the other: 8 s more than the mean on one, and as much less on the other.
    apart = shares_with(program, lambda view: 3.0 if view.replica else 1.0)
    assert seconds_of(apart, 48.0) == pytest.approx({"work": 32.0, "replicas": 16.0})


# Any program


def execute(program: Program, truth: CostTruth) -> Timeline | None:
    try:
        return Simulator(truth, 1e15).execute(program)
    except DeadlockError:
        # One rank that serves microbatches of all replicas may wait for itself.
        assert program.layout.single_rank_boundary
        return None


@pytest.mark.wide
@settings(max_examples=100, deadline=None)
@given(rngs, frameworks, st.sampled_from([0.0, 0.3]))
def test_the_classes_of_any_program_are_its_time(
    rng: np.random.Generator, framework: FrameworkOptions, noise: float
) -> None:
    num_gpus = 48  # As many as two modules of a random layout may have.
    truth = CostTruth(BOTH, tiny_cluster(6, 8), framework, ActionNoise(noise, 1))
    program = random_program(rng, random_layout(rng, BOTH), BOTH)
    if (timeline := execute(program, truth)) is None:
        return
    work_s = least_gpu_s(truth, program.shapes)
    found = time_shares(timeline, num_gpus, work_s, remade_share(truth, program))
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-12)
    assert min(found.values()) >= 0.0
    gpu_s = num_gpus * timeline.iteration_time_s
    assert found["time_unused_share"] == pytest.approx(1 - program.layout.num_ranks / num_gpus, abs=1e-12)
    if not noise:
        # No program computes less than the bound says, whatever it communicates and recomputes.
        assert found["time_work_share"] == pytest.approx(work_s / gpu_s, rel=1e-12)
    apart = [f"time_{name}_share" for name in ("work", "kernels", "recompute")]
    width = program.layout.lane_width
    computed = _per_lane(program, np.where(program.is_pass, timeline.end_s - timeline.start_s - timeline.comm_s, 0.0))
    assert sum(found[name] for name in apart) == pytest.approx(float((computed * width).sum()) / gpu_s, rel=1e-9)


@settings(max_examples=30, deadline=None)
@given(rngs)
def test_clocks_of_several_ranks_still_make_one_whole(rng: np.random.Generator) -> None:
    # Starts and ends that were measured need not follow each other on a lane.
    program = random_program(rng, random_layout(rng, BOTH), BOTH)
    start = rng.uniform(0.0, 5.0, program.num_actions)
    lasts, inside, waits = (rng.uniform(0.0, 2.0, program.num_actions) for _ in range(3))
    timeline = Timeline(program, start, start + lasts, inside, waits, np.zeros(program.layout.num_lanes))
    num_gpus = max(40, program.layout.num_ranks)
    found = time_shares(timeline, num_gpus, 3.0, rng.uniform(0.0, 1.0, program.num_actions))
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-12)
    assert min(found.values()) >= 0.0


def _per_lane(program: Program, values: FloatArray) -> FloatArray:
    return np.add.reduceat(values[program.lane_actions], program.lane_offsets[:-1])
