"""Steps, buckets and gathers: worked by hand, and against an event loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrain_bench.balancing.schedules import chain_program, stages_behind
from entrain_bench.costs.steps import (
    Traffic,
    bucket_parameters,
    first_of_stages,
    gather_lead_s,
    gather_stall_s,
    last_of_stages,
    sync_lag_s,
)
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program.assignment import same_microbatches
from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.specs.model import ModelSpec
from support.builders import as_ints, chain_layout, placed, samples, tiny_cluster, tiny_model

# 1e9 bytes/s of memory; pairs at 1e9 bytes/s and 1e-6 s, nodes at 5e8 and 2e-6, the network at 1e8 and 1e-5.
CLUSTER = tiny_cluster(num_nodes=2, gpus_per_node=8)
MODEL = tiny_model()
LLM = MODEL.llm
# An embedding and a head of 60 million parameters each, which fill three buckets with the blocks between them.
WIDE = tiny_model(encoder=0, llm=1, vocab_size=60_000_000 // 128)


def truth_of(model: ModelSpec = MODEL, **settings: object) -> CostTruth:
    return CostTruth(model, CLUSTER, FrameworkOptions(**settings))  # type: ignore[arg-type]


def test_steps_with_the_distributed_optimizer_by_hand() -> None:
    # DP 2 over ranks 0 and 4 (one node) of a model on one stage of TP 2 and CP 2: parameters / TP are sharded over 4.
    place, costs = placed(LLM, [[[0, 1, 2, 3]], [[4, 5, 6, 7]]], tp=2, cp=2), truth_of().step_costs
    held = LLM.parameters / 2
    # Two collectives over 4 ranks of the node tier: fp32 gradients are scattered, bf16 weights gathered.
    scatter, gather = (3 * 2e-6 + size * held * 3 / 4 / 5e8 for size in (4, 2))
    assert costs.sync_s(LLM, place) == pytest.approx([scatter], rel=1e-12)
    assert costs.gather_s(LLM, place) == pytest.approx([gather], rel=1e-12)
    assert costs.optimizer_s(LLM, place) == pytest.approx([held / 4 * 30 / 1e9], rel=1e-12)


def test_steps_without_the_distributed_optimizer_by_hand() -> None:
    place, costs = placed(LLM, [[[0, 1]], [[8, 9]]], tp=2), truth_of(distributed_optimizer=False).step_costs
    held = LLM.parameters / 2
    assert costs.sync_s(LLM, place) == pytest.approx([2 * (1e-5 + 4 * held / 2 / 1e8)], rel=1e-12)
    assert costs.gather_s(LLM, place).tolist() == [0.0]
    assert costs.optimizer_s(LLM, place) == pytest.approx([held * 30 / 1e9], rel=1e-12)


def test_a_tied_embedding_on_two_stages_is_reduced_between_them() -> None:
    model = tiny_model(tied_embeddings=True)
    costs = truth_of(model).step_costs
    place = placed(model.llm, [[[0], [1], [8]]])
    tied = 2 * (1e-5 + 4 * 1000 * 128 / 2 / 1e8)
    assert costs.tied_s(model.llm, place) == pytest.approx(tied, rel=1e-12)
    assert costs.exposed(model.llm, place).sync_s == pytest.approx([tied, 0.0, tied], rel=1e-12)
    assert costs.tied_s(model.llm, placed(model.llm, [[[0]]])) == 0.0
    wide = placed(model.llm, [[[0, 1], [2, 3]]], tp=2)
    assert costs.tied_s(model.llm, wide) == pytest.approx(2 * (2e-6 + 4 * 1000 * 64 / 2 / 5e8), rel=1e-12)


def test_only_the_bucket_with_the_first_layers_is_exposed() -> None:
    place, held = placed(WIDE.llm, [[[0]], [[8]]]), float(WIDE.llm.parameters)
    rest = held - 3 * 40e6
    exposed = truth_of(WIDE).step_costs.exposed(WIDE.llm, place)
    assert exposed.sync_s == pytest.approx([1e-5 + 4 * rest / 2 / 1e8], rel=1e-9)
    assert exposed.gather_s == pytest.approx([1e-5 + 2 * rest / 2 / 1e8], rel=1e-9)
    costs = truth_of(WIDE, overlap_grad_reduce=False, overlap_param_gather=False).step_costs
    exposed = costs.exposed(WIDE.llm, place)
    assert exposed.sync_s.tolist() == costs.sync_s(WIDE.llm, place).tolist()
    assert exposed.gather_s.tolist() == costs.gather_s(WIDE.llm, place).tolist()


def test_what_passes_do_not_hide_is_what_their_steps_are_charged() -> None:
    """Of several buckets only the excess over the passes is left: all of it where passes take no time."""
    place = placed(WIDE.llm, [[[0]], [[8]]])
    for aligned in (True, False):
        costs = truth_of(WIDE, align_param_gather=aligned).step_costs
        sync_s, gather_s = costs.sync_s(WIDE.llm, place), costs.gather_s(WIDE.llm, place)
        least, layers = costs.exposed(WIDE.llm, place), len(WIDE.llm.layers)
        for seconds in (0.0, 1e-2, 0.3, 100.0):
            passes = np.full(layers, seconds)
            exposed = costs.exposed_beside(WIDE.llm, place, passes, passes)
            assert np.all(exposed.sync_s >= np.maximum(least.sync_s, sync_s - passes.sum()) - 1e-9)
            assert np.all(exposed.sync_s <= sync_s + 1e-9)
            assert np.all(exposed.gather_s >= np.maximum(least.gather_s, gather_s - passes.sum()) - 1e-9)
            assert np.all(exposed.gather_s <= gather_s + 1e-9)
        nothing, plenty = (costs.exposed_beside(WIDE.llm, place, *[np.full(layers, s)] * 2) for s in (0.0, 1e6))
        assert nothing.sync_s == pytest.approx(sync_s)
        assert plenty.sync_s == pytest.approx(least.sync_s)


# Steps and gathers of a program


def test_stages_and_replicas_without_work_have_no_first_and_no_last() -> None:
    layout = chain_layout(MODEL, 1, 1, 2, dp=2)
    shapes = samples((10, [40]), (10, []))
    replica, zero = as_ints([0, 1]), np.zeros(2, np.int64)
    program = chain_program(
        MODEL, shapes, layout, same_microbatches(MODEL, shapes, replica, zero, zero), stages_behind(layout)
    )
    assert [len(stage) for stage in last_of_stages(program, 0)] == [1]
    assert [len(stage) for stage in first_of_stages(program, 1)] == [2]
    text = samples((10, []), (10, []))
    program = chain_program(
        MODEL, text, layout, same_microbatches(MODEL, text, replica, zero, zero), stages_behind(layout)
    )
    prices = truth_of().price(program)
    assert len(last_of_stages(program, 0)[0]) == len(prices.steps.last_backwards[0]) == 0
    assert prices.steps.sync_s[0] > 0.0


@dataclass(frozen=True)
class Stage:
    """One pass over a stage: seconds and parameters of each layer, parameters and seconds of each bucket."""

    layer_s: Sequence[float]
    layer_parameters: Sequence[float]
    parameters: Sequence[float]
    bucket_s: Sequence[float]

    def arguments(self) -> tuple[np.ndarray, Traffic]:
        of_layers, buckets, seconds = map(np.array, (self.layer_parameters, self.parameters, self.bucket_s))
        return np.array([self.layer_s]), Traffic(of_layers, buckets, seconds, seconds)


# Two layers of 20 and 40 parameters, which a backward passes in 4 s (last layer) and 3 s, in buckets of 25, 25 and 10:
# the first holds 25 of the last layer, the second its other 15 and 10 of the first layer, the third the other 10.
BY_HAND = Stage([3.0, 4.0], [20.0, 40.0], [25.0, 25.0, 10.0], [2.0, 5.0, 1.0])


def test_the_lag_of_two_layers_and_three_buckets_by_hand() -> None:
    # Ready at 2.5, 4 + 1.5 and 7. The first is through at 4.5; the second runs 5.5-10.5, the third after it to 11.5.
    assert sync_lag_s(*BY_HAND.arguments()).tolist() == [11.5 - 7.0]


def test_the_stall_of_two_layers_and_three_buckets_by_hand() -> None:
    # A forward needs bucket 3 at 0, bucket 2 at 1.5 (half of the first layer), bucket 1 at 3 + 15 / 40 of 4 = 4.5 s
    # of its own time. Bucket 3 keeps it waiting for 1 s; bucket 2 takes 5, of which 1.5 are hidden; bucket 1 takes 2 of
    # the 3 s that go by.
    assert gather_stall_s(*BY_HAND.arguments()).tolist() == [1.0 + 3.5]


def test_the_lead_of_two_layers_and_three_buckets_by_hand() -> None:
    # Gathered at 1, 6 and 8, needed 0, 1.5 and 4.5 after the forward's start.
    assert gather_lead_s(*BY_HAND.arguments()).tolist() == [4.5]


@pytest.mark.parametrize(
    ("parameters", "copies", "overlapped", "expected"),
    [
        (0.0, 4, True, []),
        (0.0, 4, False, []),
        (30e6, 4, True, [30e6]),
        (80e6, 4, True, [40e6, 40e6]),
        (100e6, 4, True, [40e6, 40e6, 20e6]),
        (100e6, 64, True, [64e6, 36e6]),
        (100e6, 4, False, [100e6]),
    ],
)
def test_buckets_by_hand(parameters: float, copies: int, overlapped: bool, expected: list[float]) -> None:
    assert bucket_parameters(parameters, copies, overlapped).tolist() == expected


# The event loop: tiny steps of a pass from one bucket's edge or layer's edge to the next.


@dataclass(frozen=True)
class Events:
    """When a pass over a stage, once it runs for itself, comes to the edge of each bucket, in the pass's order."""

    first_s: list[float]
    last_s: list[float]

    @classmethod
    def of(cls, layer_s: Sequence[float], layer_parameters: Sequence[float], parameters: Sequence[float]) -> Events:
        clock, bucket, left = 0.0, 0, parameters[0]
        first: dict[int, float] = {}
        last: dict[int, float] = {}
        for seconds, held in zip(layer_s, layer_parameters, strict=True):
            begin, done = clock, 0.0
            while done < held:
                first.setdefault(bucket, begin + seconds * done / held)
                part = min(left, held - done)
                done, left = done + part, left - part
                last[bucket] = begin + seconds * done / held
                if left == 0 and bucket + 1 < len(parameters):
                    bucket, left = bucket + 1, parameters[bucket + 1]
            clock = begin + seconds
        return cls([first[k] for k in range(len(parameters))], [last[k] for k in range(len(parameters))])


seconds = st.integers(0, 40).map(float)


@st.composite
def stages(draw: st.DrawFn) -> Stage:
    layers = draw(st.lists(st.tuples(seconds, st.integers(1, 40).map(float)), min_size=1, max_size=5))
    total = int(sum(held for _, held in layers))
    size = draw(st.integers(1, total))
    parameters = [float(size)] * (total // size) + [float(total % size)] * (total % size > 0)
    bucket_s = draw(st.lists(seconds, min_size=len(parameters), max_size=len(parameters)))
    return Stage([each for each, _ in layers], [held for _, held in layers], parameters, bucket_s)


@given(stages())
def test_the_lag_equals_an_event_loop(stage: Stage) -> None:
    events = Events.of(stage.layer_s[::-1], stage.layer_parameters[::-1], stage.parameters)
    through = 0.0
    for ready, took in zip(events.last_s, stage.bucket_s, strict=True):
        through = max(through, ready) + took
    assert sync_lag_s(*stage.arguments())[0] == pytest.approx(through - sum(stage.layer_s), rel=1e-9, abs=1e-9)


def forward_end_s(stage: Stage, begin: float, launched_at_0: bool) -> float:
    """End of a forward that begins at some time and waits inside for each bucket of weights."""
    parameters, bucket_s = stage.parameters[::-1], stage.bucket_s[::-1]
    events = Events.of(stage.layer_s, stage.layer_parameters, parameters)
    waited, gathered = 0.0, 0.0
    launched = 0.0 if launched_at_0 else begin
    for first, took in zip(events.first_s, bucket_s, strict=True):
        gathered = (max(gathered, launched) if launched_at_0 else launched) + took
        waited += max(0.0, gathered - (begin + first + waited))
        # Without alignment the next gather is launched when this one has been waited for.
        launched = 0.0 if launched_at_0 else begin + first + waited
    return begin + sum(stage.layer_s) + waited


@given(stages(), seconds)
def test_the_stall_equals_an_event_loop(stage: Stage, begin: float) -> None:
    end = forward_end_s(stage, begin, launched_at_0=False)
    stall = gather_stall_s(*stage.arguments())[0]
    assert end == pytest.approx(begin + stall + sum(stage.layer_s), rel=1e-9, abs=1e-9)


@given(stages())
def test_the_lead_is_the_earliest_start_that_never_waits_and_waiting_inside_ends_no_earlier(stage: Stage) -> None:
    lead, own = gather_lead_s(*stage.arguments())[0], sum(stage.layer_s)
    assert forward_end_s(stage, lead, launched_at_0=True) == pytest.approx(lead + own, rel=1e-9, abs=1e-9)
    # Nothing is lost by waiting at the start: whoever begins at once ends at the same time.
    assert forward_end_s(stage, 0.0, launched_at_0=True) == pytest.approx(lead + own, rel=1e-9, abs=1e-9)
