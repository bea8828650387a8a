"""WLB-LLM's microbatches on batches worked by hand, and its programs on pipelines with virtual stages."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.balancing.interleaved import find_turns
from entrain_bench.base.arrays import IntArray
from entrain_bench.program.validate import check_program
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import RunContext, prepare
from entrain_bench_strategies.wlb_llm import WorkloadPacking, packed
from support.builders import chain_layout, profile_of, samples, tiny_job, tiny_model

SMALL = ("model=tiny", "cluster=tiny", "global_batch=16", "microbatch_size=2", "workload=synthetic", "layout.tp=1")


def setting(*overrides: str) -> RunContext:
    return prepare(compose_cells(["strategy=wlb_llm", *SMALL, *overrides])[0].config)


def packs_of(lengths: list[int], num_packs: int, room: float) -> IntArray:
    """Microbatches of documents in the given order, whose workloads are squared lengths."""
    length = np.array(lengths, float)
    return np.asarray(packed(np.arange(len(length)), length**2, length, num_packs, room))


def test_short_documents_join_until_workloads_are_equal() -> None:
    # Squares 36 and 9 + 9 + 4: the microbatch of short documents is longer than the one of the outlier.
    assert packs_of([6, 3, 3, 2], 2, 10.0).tolist() == [0, 1, 1, 1]


def test_documents_come_in_order_of_falling_workload() -> None:
    model = tiny_model()
    shapes = samples((2000, []), (3000, []), (3000, []), (6000, []))
    profile = profile_of(tiny_job(model), shapes)
    labels = WorkloadPacking().assign(shapes, chain_layout(model, 1, 1, 1, dp=2), profile)
    # The longest has a replica of its own.
    assert np.bincount(labels.modules[-1].replica)[labels.modules[-1].replica[3]] == 1


def test_the_shortest_microbatch_takes_documents_for_which_the_lightest_has_no_room() -> None:
    # The second has the least workload, 18, and no room for a sixth token more; nor has the first.
    assert packs_of([6, 3, 3, 2], 2, 7.0).tolist() == [0, 1, 1, 0]
    # Workloads 25, 20 and 18 of lengths 5, 6 and 6: the lightest, of 6, is full, so the last joins the shortest.
    assert packs_of([5, 4, 3, 3, 2, 2], 3, 6.5).tolist() == [0, 1, 2, 2, 1, 0]


def test_the_heaviest_microbatch_is_within_the_bound_of_longest_first() -> None:
    rng = np.random.default_rng(0)
    for _ in range(40):
        lengths = sorted(rng.integers(1, 12, int(rng.integers(3, 8))).tolist(), reverse=True)
        work, num_packs = np.array(lengths, float) ** 2, int(rng.integers(2, 4))
        heaviest = np.bincount(packs_of(lengths, num_packs, np.inf), work).max()
        every = product(range(num_packs), repeat=len(lengths))
        least = min(np.bincount(packs, work).max() for packs in every)
        assert heaviest <= least * (4 / 3 - 1 / (3 * num_packs)) * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    num_packs=st.integers(1, 9),
    room=st.integers(1, 200),
)
def test_no_microbatch_is_overfull_while_another_has_room(lengths: list[int], num_packs: int, room: int) -> None:
    lengths = sorted(lengths, reverse=True)
    pack = packs_of(lengths, num_packs, float(room))
    assert {*range(min(num_packs, len(lengths)))} <= {*pack.tolist()}
    held = np.zeros(num_packs)
    for length, one in zip(lengths, pack.tolist(), strict=True):
        assert held[one] + length <= room or held[one] == held.min()
        held[one] += length


@pytest.mark.parametrize(
    "overrides", [("layout.dp=4",), ("layout.pp=2", "layout.dp=2"), ("layout.cp=2", "layout.dp=2")]
)
def test_replicas_have_equally_many_microbatches_of_every_sample_once(overrides: tuple[str, ...]) -> None:
    made = setting(*overrides)
    layout = made.strategy.plan(made.profile)
    program = made.strategy.program(made.profile.samples.draw(16), layout, made.profile)
    check_program(program)
    rows = program.chunks[-1]
    assert sorted(rows.members.tolist()) == [*range(16)]
    chunks = [*zip(rows.replica.tolist(), rows.microbatch.tolist(), strict=True)]
    assert sorted(chunks) == [*product(range(layout.modules[-1].dp), range(layout.num_microbatches))]


def test_virtual_stages_run_interleaved() -> None:
    made = setting("layout.pp=2", "layout.dp=2", "strategy.planner.schedules=[interleaved]")
    layout = made.strategy.plan(made.profile)
    turns = find_turns(made.job.model, layout)
    assert turns is not None
    assert turns.turns == 2
    check_program(made.strategy.program(made.profile.samples.draw(16), layout, made.profile))
