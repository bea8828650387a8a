"""Deferral on other systems' microbatches, by hand, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.balancing.interface import Assigner
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.program.assignment import Assignment
from entrain_bench.program.layout import Layout
from entrain_bench.program.timeline import Timeline
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench_strategies.dip import DipAssigner
from entrain_bench_strategies.entrain import DeferringAssigner
from entrain_bench_strategies.megatron import ArrivalOrder
from support.builders import chain_layout, profile_of, random_samples, samples, tiny_job, tiny_model

MODEL = tiny_model(encoder=2, llm=2)
# LLM work of about 5, 3, 1 and 1.
A, B, C, D = (5000, [40]), (3000, [40]), (1000, [40]), (1000, [40])


def deferred(*rows: tuple[int, list[int]], base: Assigner | None = None, dp: int = 1) -> Assignment:
    """Microbatches of two samples in arrival order, then deferral."""
    shapes = samples(*rows)
    profile = profile_of(tiny_job(MODEL, global_batch=len(rows), microbatch_size=2), shapes)
    layout = chain_layout(MODEL, 1, 1, len(rows) // 2 // dp, dp=dp)
    return DeferringAssigner(base or ArrivalOrder()).assign(shapes, layout, profile)


def microbatches(assignment: Assignment) -> list[list[int]]:
    return [labels.microbatch.tolist() for labels in assignment.modules]


def test_half_the_difference_moves_to_the_partner() -> None:
    # 8 against 2: B's 3 make both 5.
    assert microbatches(deferred(A, B, C, D)) == [[0, 0, 1, 1], [0, 1, 1, 1]]


def test_the_overloaded_microbatch_comes_first() -> None:
    assert microbatches(deferred(C, D, A, B)) == [[1, 1, 0, 0], [1, 1, 0, 1]]


def test_replicas_are_the_bases_and_are_paired_by_themselves() -> None:
    # Microbatches go round the replicas: A and B, then C and D, in each.
    found = deferred(A, B, A, B, C, D, C, D, dp=2)
    assert found.modules[1].replica.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert microbatches(found) == [[0, 0, 0, 0, 1, 1, 1, 1], [0, 1, 0, 1, 1, 1, 1, 1]]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_encoder_microbatches_stay_and_the_heaviest_llm_microbatch_gets_no_heavier(seed: int) -> None:
    shapes = random_samples(np.random.default_rng(seed), 16, longest=8000)
    profile = profile_of(tiny_job(MODEL, global_batch=16, microbatch_size=2), shapes)
    layout = chain_layout(MODEL, 1, 1, 8)
    found = DeferringAssigner(ArrivalOrder()).assign(shapes, layout, profile).modules
    _, llm_s = profile.estimates.samples(shapes, 1, 1)
    of_item = shapes.item_sample[MODEL.modules[0].units(shapes)]
    encoder = np.full(16, -1)
    encoder[of_item] = found[0].microbatch
    pairs = encoder.reshape(8, 2)
    assert np.all((pairs[:, 0] == pairs[:, 1]) | (pairs < 0).any(axis=1))
    late = found[1].microbatch[of_item] - found[0].microbatch
    assert set(late.tolist()) <= {0, 1}
    before, after = np.bincount(np.arange(16) // 2, llm_s), np.bincount(found[1].microbatch, llm_s)
    # A bin is 1 of 512 of the heaviest.
    assert after.max() <= before.max() * (1 + 1e-9)


def test_items_cut_away_from_their_sample_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("entrain_bench_strategies.dip.partitioner.EFFICIENCY", 0.01)
    with pytest.raises(IncompatibleError, match="base=DipAssigner: puts vision items of sample 1 and"):
        deferred((100, [40]), (100, [40]), (100, [40]), (100, [40]), base=DipAssigner())


@dataclass(frozen=True)
class Learning:
    """Counts what it has seen."""

    seen: int = 0
    quick: bool = False

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        return ArrivalOrder().assign(shapes, layout, profile)

    def observe(self, timeline: Timeline, profile: Profile) -> Learning:  # noqa: ARG002
        return Learning(self.seen + 1, self.quick)

    def draft(self) -> Learning:
        return Learning(self.seen, True)


def test_a_base_still_learns_and_drafts() -> None:
    nothing = object.__new__(Timeline), object.__new__(Profile)
    assert DeferringAssigner(Learning(2)).observe(*nothing).base == Learning(3)
    assert DeferringAssigner(Learning(2)).draft().base == Learning(2, True)
    plain = DeferringAssigner(ArrivalOrder())
    assert plain.observe(*nothing) is plain
    assert plain.draft() is plain
