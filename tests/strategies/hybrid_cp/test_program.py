"""Rounds of groups as labels and programs: items follow their sample, every position has one pack a round."""

from __future__ import annotations

import numpy as np
import pytest

from entrain_bench.balancing.interface import Strategy
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.rounds import Rounds, mean_tokens, plane_layout, round_labels
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.program.columns import Pass
from entrain_bench.program.layout import Layout
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import prepare
from support.builders import samples

SMALL = ("model=tiny", "cluster=tiny", "global_batch=16", "microbatch_size=2", "workload=synthetic", "layout.tp=1")
FREE = ("layout.dp=null", "layout.cp=null")


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


def test_main_needs_one_stage_and_runs_samples_alone() -> None:
    profile, strategy = setting(*FREE, "strategy.assigner.scheduler=main")
    with pytest.raises(IncompatibleError, match=r"layout\.pp=2: must be 1 with strategy\.assigner\.scheduler=main"):
        strategy.program(profile.samples.draw(16), layout_of(profile, 2), profile)
    program = strategy.program(profile.samples.draw(16), layout_of(profile), profile)
    assert len(program.chunks[-1]) == 16
    assert {placed.pp for placed in strategy.plan(profile).modules} == {1}


def test_tokens_of_a_round_follow_from_the_rounds() -> None:
    profile, _ = setting(*FREE)
    tokens = int(profile.samples.tuning_batches(1, profile.job.global_batch)[0].llm_tokens.sum())
    assert mean_tokens(profile, layout_of(profile)) == -(-tokens // 8)


def test_rounds_need_widths_and_a_plane_that_is_a_power_of_two() -> None:
    profile, strategy = setting(*FREE, "strategy/planner=megatron")
    with pytest.raises(IncompatibleError, match=r"hybrid_cp needs groups of several widths with one TP .*vision has"):
        strategy.plan(profile)
    profile, strategy = setting(*FREE, "cluster.num_nodes=3")
    with pytest.raises(IncompatibleError, match="DP x CP is 12, must be a power of two"):
        strategy.program(profile.samples.draw(16), layout_of(profile), profile)
