"""Assigners that learn in a loop that is not this suite's, and what they know in a state."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from entrain_bench.base.errors import UserError
from entrain_bench.program import Pass
from entrain_bench.sampler import BalancedBatchSampler
from entrain_bench.sampler.learning import executed, values_of, with_values
from entrain_bench_strategies.dflop import Corrector, DflopAssigner
from entrain_bench_strategies.megatron import ArrivalOrder
from support.builders import chain_layout, random_samples, samples, tiny_model

MODEL = tiny_model()
SHAPES = random_samples(np.random.default_rng(0), 128)
RANKS, COUNT = 2, 4
# Nothing is lost by tracking for as long as these tests last.
ALWAYS = ("strategy.assigner.correction.cost_s=0", "strategy.assigner.correction.window=100")


def sampler(**more: Any) -> BalancedBatchSampler:
    given = {"strategy": "dflop", "rank": 0, "model": "tiny", "cluster": "tiny", "overrides": ALWAYS} | more
    return BalancedBatchSampler(SHAPES, world_size=RANKS, global_batch=16, microbatch_size=2, **given)


def slow_images(one: BalancedBatchSampler, iteration: int) -> dict[str, Any]:
    """Timings in which long sequences take far more than believed."""
    timings: dict[str, Any] = {}
    for module, sizes in (("vision", SHAPES.encoder_tokens(["image"])), ("llm", SHAPES.llm_tokens)):
        rows = [[float((sizes[row] ** 3.0).sum()) for row in one.microbatches(iteration, rank=r)] for r in range(RANKS)]
        timings[module] = [[[1e-9 * s, 2e-9 * s] for s in row] for row in rows]
    return timings


def test_what_ran_becomes_a_timeline() -> None:
    shapes = samples((5, [8]), (5, [4]), (5, [8]))
    layout = chain_layout(MODEL, 1, 1, 2, dp=2)
    layout = replace(layout, modules=tuple(replace(m, ranks=np.array([[[0]], [[1]]])) for m in layout.modules))
    dealt = (((0, 2),), ((1,),))
    timings = {"vision": [[[1.0, 2.0]], [[3.0, 4.0]]], "llm": [[[5.0, 6.0]], [[7.0, 8.0]]]}
    timeline = executed(MODEL, shapes, layout, dealt, timings)
    seen = {
        (v.module, v.kind, v.replica, v.members): timeline.end_s[v.index] - timeline.start_s[v.index]
        for v in map(timeline.program.view, range(timeline.program.num_actions))
        if v.kind in (Pass.FORWARD, Pass.BACKWARD)
    }
    assert seen == {
        ("vision", Pass.FORWARD, 0, (0, 2)): 1.0,
        ("vision", Pass.BACKWARD, 0, (0, 2)): 2.0,
        ("vision", Pass.FORWARD, 1, (1,)): 3.0,
        ("vision", Pass.BACKWARD, 1, (1,)): 4.0,
        ("llm", Pass.FORWARD, 0, (0, 2)): 5.0,
        ("llm", Pass.BACKWARD, 0, (0, 2)): 6.0,
        ("llm", Pass.FORWARD, 1, (1,)): 7.0,
        ("llm", Pass.BACKWARD, 1, (1,)): 8.0,
    }


def test_only_one_stage_can_be_timed() -> None:
    with pytest.raises(UserError, match="must have one stage and one DP, because"):
        executed(MODEL, samples((5, [8])), chain_layout(MODEL, 1, 2, 1), (((0,),),), {})


def test_what_is_observed_changes_assignments_after_the_lag_and_not_before() -> None:
    one, same = sampler(learning_lag=3), sampler(learning_lag=3)
    one.observe(0, slow_images(one, 0))
    plain, learnt = ([lazy.microbatches(i) for i in range(8)] for lazy in (same, one))
    assert learnt[:3] == plain[:3]
    assert learnt[3:] != plain[3:]


def test_ranks_that_observe_the_same_agree_whatever_their_loaders_took() -> None:
    ranks = [sampler(rank=rank) for rank in range(RANKS)]
    streams = [iter(one) for one in ranks]
    for iteration in range(8):
        # Rank 1 is half an iteration ahead.
        rows = [[next(stream) for _ in range(COUNT)] for stream in streams]
        assert rows == [ranks[0].microbatches(iteration, rank=rank) for rank in range(RANKS)]
        timings = slow_images(ranks[0], iteration)
        for one in ranks:
            one.observe(iteration, timings)
    assert ranks[0].learns
    assert not sampler(strategy="entrain", overrides=()).learns


@pytest.mark.wide
@pytest.mark.parametrize("at", [3, 4])
def test_what_was_learnt_is_in_a_state(at: int) -> None:
    one = sampler()
    for iteration in range(at):
        one.observe(iteration, slow_images(one, iteration))
    state = one.state_dict(iteration=at)
    other = sampler()
    other.load_state_dict(state)
    for learner in (one, other):
        learner.observe(at, slow_images(one, at))
    resumed, wanted, plain = ([lazy.microbatches(i) for i in range(at, 8)] for lazy in (other, one, sampler()))
    assert resumed == wanted != plain


def test_observing_too_late_is_refused_on_the_rank_that_was_too_fast() -> None:
    one = sampler()
    timings = slow_images(one, 0)
    one.microbatches(3)
    with pytest.raises(UserError, match="learning_lag=2: must be at least 4, because the loader already took 2"):
        one.observe(0, timings)
    two = sampler()
    two.observe(1, slow_images(two, 1))
    with pytest.raises(UserError, match="observe: iteration=0: must be later than the last observed one"):
        two.observe(0, timings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"llm": None}, r"observe: timings of=\['vision'\]: must be of \['llm', 'vision'\]"),
        ({"llm": [[]]}, "observe: llm: ranks=1: must be all 2"),
        ({"llm": [[[1.0, 1.0]]] * 2}, r"observe: llm: rank 0=.*: must be forward and backward seconds \[4, 2\]"),
        ({"llm": [[[1.0, -1.0]] * 4] * 2}, r"observe: llm: rank 0=.*: must be .* of at least 0"),
    ],
)
def test_timings_of_something_else_are_one_line(change: dict[str, Any], message: str) -> None:
    one = sampler()
    timings = slow_images(one, 0) | change
    with pytest.raises(UserError, match=message):
        one.observe(0, {name: rows for name, rows in timings.items() if rows is not None})


def test_a_part_is_plain_values_and_back() -> None:
    part = DflopAssigner(correction=Corrector(ratios={3: 1.5}, benefits_s=(0.25, 0.5)))
    values = values_of(part)
    assert values["correction"]["ratios"] == {3: 1.5}
    assert with_values(DflopAssigner(), values, "assigner") == part
    with pytest.raises(UserError, match="state: assigner=DflopAssigner: must be ArrivalOrder"):
        with_values(ArrivalOrder(), values, "assigner")
    with pytest.raises(UserError, match=r"state: assigner.correction=Corrector: must be None"):
        with_values(DflopAssigner(correction=None), values, "assigner")


@dataclass(frozen=True)
class Odd:
    inside: Any


def test_a_part_with_anything_else_cannot_be_saved() -> None:
    with pytest.raises(UserError, match=r"holds a Tensor. To be saved, it must be made of dataclasses"):
        values_of(Odd(torch.zeros(1)))
    kept = Odd((1, (2.0, "three")))
    assert with_values(kept, values_of(kept), "assigner") == kept
