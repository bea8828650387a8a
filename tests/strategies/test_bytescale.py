"""ByteScale's ranks and microbatches on batches worked by hand, and its programs in one stage and in several."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.base.errors import IncompatibleError
from entrain_bench.program.columns import Pass
from entrain_bench.program.validate import check_program
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import RunContext, prepare
from entrain_bench_strategies.bytescale import best_fit, hybrid_rounds

SMALL = ("model=tiny", "cluster=tiny", "global_batch=16", "microbatch_size=2", "workload=synthetic", "layout.tp=1")
FREE = ("layout.cp=null", "layout.dp=null")


def setting(*overrides: str) -> RunContext:
    return prepare(compose_cells(["strategy=bytescale", *SMALL, *FREE, *overrides])[0].config)


def test_a_rank_of_short_sequences_runs_more_microbatches_and_ends_with_the_others() -> None:
    # Squared lengths 4, 2, 2, 2, 2 on two ranks; no two of the short ones fit together.
    seconds = np.array([16.0, 4.0, 4.0, 4.0, 4.0])
    rounds = hybrid_rounds(seconds, np.array([4, 3, 3, 3, 3]), np.zeros(5, np.int64), 2, 4, 1)
    assert rounds.first.tolist() == [0, 1, 1, 1, 1]
    assert rounds.number.tolist() == [0, 3, 2, 1, 0]
    assert np.bincount(rounds.first, seconds).tolist() == [16.0, 16.0]


def test_wide_sequences_come_first_on_aligned_groups() -> None:
    # Lengths 16, 8, 8, 4, 2, 2 at 4 tokens a rank, on four ranks: squares over widths.
    level = np.array([2, 1, 1, 0, 0, 0])
    seconds = np.array([64.0, 32.0, 32.0, 16.0, 4.0, 4.0])
    rounds = hybrid_rounds(seconds, np.array([16, 8, 8, 4, 2, 2]), level, 4, 4, 1)
    assert rounds.width.tolist() == [4, 2, 2, 1, 1, 1]
    assert rounds.first.tolist() == [0, 0, 2, 0, 1, 2]
    assert rounds.number.tolist() == [0, 1, 1, 2, 2, 2]


def test_pipelines_start_on_their_level_of_length() -> None:
    seconds = np.array([3.0, 6.0, 3.0, 6.0, 3.0, 3.0])
    size, level = np.ones(6, np.int64), np.zeros(6, np.int64)
    assert hybrid_rounds(seconds, size, level, 2, 9, 2).first.tolist() == [1, 0, 1, 0, 1, 1]
    assert hybrid_rounds(seconds, size, level, 2, 9, 1).first.tolist() == [0, 0, 1, 1, 0, 1]
    # The level of the first rank is used up first; then it helps with the other.
    uneven = hybrid_rounds(np.array([5.0, 5.0, 1.0, 1.0]), np.ones(4, np.int64), np.zeros(4, np.int64), 2, 9, 2)
    assert uneven.first.tolist() == [0, 1, 0, 1]


def test_a_pack_is_the_fullest_with_room() -> None:
    size = np.array([4, 7, 3, 6, 9])
    group = np.array([0, 0, 0, 0, 1])
    assert best_fit(np.arange(5), size, group, 10).tolist() == [0, 1, 1, 0, 0]
    assert best_fit(np.array([2, 0, 4]), size, group, 6).tolist() == [0, 1, 0]


def test_ranks_end_within_the_bound_of_longest_first() -> None:
    rng = np.random.default_rng(0)
    for _ in range(40):
        count, num_ranks = int(rng.integers(2, 8)), int(rng.integers(2, 4))
        seconds = rng.integers(1, 30, count).astype(float)
        rounds = hybrid_rounds(seconds, np.ones(count, np.int64), np.zeros(count, np.int64), num_ranks, 3, 1)
        least = min(np.bincount(ranks, seconds, num_ranks).max() for ranks in product(range(num_ranks), repeat=count))
        assert np.bincount(rounds.first, seconds).max() <= least * (4 / 3 - 1 / (3 * num_ranks)) * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=40),
    num_ranks=st.sampled_from([1, 2, 3, 8, 12]),
    num_buckets=st.integers(1, 14),
)
def test_packs_keep_the_capacity_and_ranks_run_theirs_one_after_another(
    lengths: list[int], num_ranks: int, num_buckets: int
) -> None:
    size = np.array(lengths)
    widths = 2 ** np.arange(num_ranks.bit_length())
    capacity = max(20, -(-int(size.max()) // int(widths[-1])))
    level = np.searchsorted(widths, -(-size // capacity))
    rounds = hybrid_rounds(size.astype(float) ** 2, size, level, num_ranks, capacity, num_buckets)
    assert np.all(rounds.width * capacity >= size)
    assert np.all((rounds.width == 1) | (rounds.width * capacity < 2 * size))
    assert not np.any(rounds.first % rounds.width)
    assert np.all(rounds.first + rounds.width <= num_ranks)
    packs, pack = np.unique(np.stack([rounds.number, rounds.first, rounds.width]), axis=1, return_inverse=True)
    assert np.all(np.bincount(pack.ravel(), size) <= capacity * packs[2])
    for rank in range(num_ranks):
        mine = (packs[1] <= rank) & (rank < packs[1] + packs[2])
        assert packs[0][mine].tolist() == [*range(mine.sum())]
        assert np.all(np.diff(packs[2][mine]) <= 0)


@pytest.mark.parametrize(("pp", "size"), [(1, 1), (2, 4)])
def test_programs_hold_every_sample_once_in_1f1b_with_unequal_numbers(pp: int, size: int) -> None:
    made = setting("cluster.num_nodes=2", f"layout.pp={pp}", f"microbatch_size={size}")
    layout = made.strategy.plan(made.profile)
    program = made.strategy.program(made.profile.samples.draw(16), layout, made.profile)
    check_program(program)
    assert sorted(program.chunks[-1].members.tolist()) == [*range(16)]
    counts = set()
    for lane in range(layout.num_lanes):
        mine = program.lane_actions[program.lane_offsets[lane] : program.lane_offsets[lane + 1]]
        mine = mine[(program.module[mine] == 1) & np.isin(program.kind[mine], (Pass.FORWARD, Pass.BACKWARD))]
        number = program.chunks[-1].microbatch[program.chunk[mine]]
        for kind in (Pass.FORWARD, Pass.BACKWARD):
            assert number[program.kind[mine] == kind].tolist() == [*range(len(mine) // 2)]
        counts.add(len(mine) // 2)
    assert len(counts) > 1


def test_groups_of_several_widths_are_needed() -> None:
    made = setting("strategy/planner=megatron")
    with pytest.raises(IncompatibleError, match="bytescale needs groups of several widths with one TP"):
        made.strategy.plan(made.profile)
