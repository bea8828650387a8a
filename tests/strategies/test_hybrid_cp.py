"""Dynamic context parallelism: groups by hand and on properties, and whole programs."""

from __future__ import annotations

import numpy as np
import pytest

from entrain_bench.balancing.interface import Strategy
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.rounds import Rounds, plane_layout, round_labels
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.program.columns import Pass
from entrain_bench.program.layout import Layout
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import prepare
from entrain_bench_strategies.sequence_balanced_cp import dev_rounds, filled
from support.builders import samples

# Lengths, then the work of each of four ranks of capacity 4 in every round of Megatron-LM's dev (d48bd6be).
ORACLES = [
    ([8, 4, 4], [[32, 32, 16, 16]]),
    ([16, 4], [[64] * 4, [4] * 4]),
    ([16, 8, 4, 4, 4, 4], [[64] * 4, [32, 32, 16, 16], [8] * 4]),
    ([12, 4], [[40] * 4]),
    ([4] * 8, [[16] * 4, [16] * 4]),
]
SMALL = ("model=tiny", "cluster=tiny", "global_batch=16", "microbatch_size=2", "workload=synthetic", "layout.tp=1")
FREE = ("layout.dp=null", "layout.cp=null")


@pytest.mark.parametrize(("lengths", "expected"), ORACLES)
def test_the_smallest_batches_are_grouped_as_megatron_does(lengths: list[int], expected: list[list[float]]) -> None:
    rounds = dev_rounds(np.array(lengths), 4, 4)
    work = np.zeros((1 + rounds.number.max(), 4))
    for length, number, first, width in zip(lengths, rounds.number, rounds.first, rounds.width, strict=True):
        work[number, first : first + width] += length**2 / width
    assert work.tolist() == expected


def test_idle_ranks_go_to_the_first_of_the_narrowest_groups() -> None:
    assert filled(np.array([2, 1]), 8).tolist() == [4, 4]
    assert filled(np.array([4, 1, 1]), 8).tolist() == [4, 2, 2]
    assert filled(np.array([4, 1, 1, 1]), 8).tolist() == [4, 2, 1, 1]


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
def test_random_batches_lose_no_sample_and_leave_no_rank_idle(num_ranks: int) -> None:
    rng = np.random.default_rng(num_ranks)
    for _ in range(100):
        lengths = np.ceil(np.minimum(rng.lognormal(4, 1.5, rng.integers(1, 40)), 64 * num_ranks)).astype(np.int64)
        made = dev_rounds(lengths, num_ranks, 64)
        assert not np.any(made.first % made.width)
        # In every round each rank is in one group, whose sequences fit together.
        packs = np.stack([made.number, made.first, made.width])
        groups, group = np.unique(packs, axis=1, return_inverse=True)
        assert np.all(np.bincount(group.ravel(), lengths) <= 64 * groups[2])
        busy = np.zeros((made.number.max() + 1, num_ranks), np.int64)
        for number, first, width in groups.T:
            busy[number, first : first + width] += 1
        assert np.all(busy == 1)


def setting(*overrides: str) -> tuple[Profile, Strategy]:
    made = prepare(compose_cells(["strategy=hybrid_cp", *SMALL, *overrides])[0].config)
    return made.profile, made.strategy


def layout_of(profile: Profile, pp: int = 1, leading: bool = False) -> Layout:
    blocks = len(profile.job.model.llm.layers)
    encoder = (len(profile.job.model.encoders[0].layers),)
    llm = (blocks - pp + 1 + leading, *[1] * (pp - 1 - leading))
    return plane_layout(profile.job, 1, [encoder, llm], leading, (False, False), 2)


def test_items_of_a_pack_are_dealt_out_to_its_group_or_shared_by_it() -> None:
    profile, _ = setting(*FREE)
    model, layout = profile.job.model, layout_of(profile)
    # Three samples; the first, on ranks 2 and 3 together, has three items, the second one item on rank 1.
    shapes = samples((8, [16, 64, 32]), (4, [16]), (4, []))
    rounds = Rounds(np.array([0, 0, 1]), np.array([2, 1, 0]), np.array([2, 1, 4]))
    spread = round_labels(model, shapes, layout, rounds, spread=True)
    assert spread.modules[0].replica.tolist() == [3, 2, 3, 1]
    assert spread.modules[0].microbatch.tolist() == [0, 0, 0, 0]
    # Groups of one rank are 0 to 3, of two 4 and 5, of four 6.
    assert spread.modules[1].replica.tolist() == [5, 1, 6]
    shared = round_labels(model, shapes, layout, rounds, spread=False)
    assert shared.modules[0].replica.tolist() == [5, 5, 5, 1]
    assert shared.modules[1].replica.tolist() == [5, 1, 6]


@pytest.mark.parametrize("pp", [1, 2])
def test_every_rank_has_one_pack_a_round_in_1f1b(pp: int) -> None:
    profile, strategy = setting(*FREE)
    layout = layout_of(profile, pp)
    program = strategy.program(profile.samples.draw(16), layout, profile)
    llm = program.layout.modules[-1]
    rounds = 1 + int(program.chunks[-1].microbatch.max())
    width = np.array([cp for _, cp in llm.degrees])[llm.degree_of_copy[program.chunks[-1].replica]]
    assert np.bincount(program.chunks[-1].microbatch, width).tolist() == [llm.dp] * rounds
    for lane in range(layout.num_lanes):
        own = program.lane_actions[program.lane_offsets[lane] : program.lane_offsets[lane + 1]]
        own = own[(program.module[own] == 1) & np.isin(program.kind[own], (Pass.FORWARD, Pass.BACKWARD))]
        number = program.chunks[-1].microbatch[program.chunk[own]]
        order = [(int(kind == Pass.BACKWARD), int(each)) for kind, each in zip(program.kind[own], number, strict=True)]
        ahead = pp - 1 - lane // llm.dp
        assert order[: ahead + 1] == [(0, each) for each in range(ahead + 1)]
        assert order[ahead + 1] == (1, 0)
        assert [each for kind, each in order if kind] == [*range(rounds)]


def test_rounds_need_widths_and_a_plane_that_is_a_power_of_two() -> None:
    profile, strategy = setting(*FREE, "strategy/planner=megatron")
    with pytest.raises(IncompatibleError, match=r"hybrid_cp needs groups of several widths with one TP .*vision has"):
        strategy.plan(profile)
    profile, strategy = setting(*FREE, "cluster.num_nodes=3")
    with pytest.raises(IncompatibleError, match="DP x CP is 12, must be a power of two"):
        strategy.program(profile.samples.draw(16), layout_of(profile), profile)
