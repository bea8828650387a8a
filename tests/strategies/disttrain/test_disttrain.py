"""DistTrain's assigner and brokers, and whole runs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.balancing.lpt import place_in_group
from entrain_bench.balancing.planning import Island, place_islands
from entrain_bench.base.arrays import IntArray
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.program.assignment import Assignment
from entrain_bench.program.layout import Layout
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import run_experiment
from entrain_bench_strategies.disttrain import DistTrainAssigner, DistTrainScheduler
from entrain_bench_strategies.disttrain.assigner import stage_shares, unit_replicas
from support.builders import (
    chain_layout,
    labels,
    placed,
    profile_of,
    random_samples,
    samples,
    tiny_cluster,
    tiny_job,
)
from support.disttrain import MODEL, profile_for

# The assigner


def disjoint(encoder_dp: int, llm_dp: int, count: int) -> Layout:
    islands = [Island(1, 1, encoder_dp, (3, 3)), Island(1, 1, llm_dp, (4, 4))]
    return place_islands(tiny_job(MODEL, tiny_cluster(8, 8)), islands, count)


def by_replica(replica: IntArray) -> list[list[int]]:
    return [np.flatnonzero(replica == r).tolist() for r in range(int(replica.max()) + 1)]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["none", "microbatch", "global_batch"]), st.integers(1, 4))
def test_inter_reordering_permutes_microbatches_and_nothing_else(seed: int, intra: str, count: int) -> None:
    shapes = random_samples(np.random.default_rng(seed), 4 * count * 2)
    layout = disjoint(2, 4, count)
    profile = profile_of(tiny_job(MODEL, global_batch=len(shapes), microbatch_size=2), shapes)
    plain = DistTrainAssigner(intra, inter=False).assign(shapes, layout, profile).modules[-1]
    moved = DistTrainAssigner(intra, inter=True).assign(shapes, layout, profile).modules[-1]
    assert by_replica(plain.replica) == by_replica(moved.replica)
    sets = [
        {
            frozenset(np.flatnonzero((a.replica == r) & (a.microbatch == m)).tolist())
            for r in range(4)
            for m in range(count)
        }
        for a in (plain, moved)
    ]
    assert sets[0] == sets[1]
    assert all(len(members) == 2 for members in sets[0])


@pytest.mark.parametrize(("intra", "carry"), [("global_batch", False), ("microbatch", True), ("microbatch", False)])
def test_intra_reordering_evens_the_encoder_work_out(intra: str, carry: bool) -> None:
    """Over the batch; without carrying loads over, over each microbatch of all ranks."""
    shapes = random_samples(np.random.default_rng(3), 64, longest=4000)
    layout, profile = disjoint(4, 4, 8), profile_of(tiny_job(MODEL, global_batch=64), shapes)
    encoder, _ = profile.estimates.samples(shapes, 1, 1)
    alone = intra == "microbatch" and not carry
    spread = []
    for assigner in (DistTrainAssigner("none", inter=False), DistTrainAssigner(intra, inter=False, carry=carry)):
        labels = assigner.assign(shapes, layout, profile).modules[-1]
        row = labels.microbatch if alone else np.zeros(64, np.int64)
        work = np.bincount(4 * row + labels.replica, weights=encoder, minlength=4 * (row.max() + 1)).reshape(-1, 4)
        spread.append(float(np.ptp(work, axis=1).mean()))
    assert spread[1] < 0.5 * spread[0]


def test_more_encoder_replicas_than_the_llms_are_balanced_one_by_one() -> None:
    shapes = random_samples(np.random.default_rng(8), 64, longest=4000)
    layout, profile = disjoint(4, 2, 16), profile_of(tiny_job(MODEL, global_batch=64), shapes)
    spread = []
    for scope in ("none", "global_batch"):
        labels = DistTrainAssigner(scope).assign(shapes, layout, profile).modules[0]
        work = np.bincount(labels.replica, weights=profile.estimates.units(MODEL.modules[0], shapes, 1, 1), minlength=4)
        spread.append(np.ptp(work))
    assert spread[1] < 0.2 * spread[0]


@pytest.mark.parametrize(
    ("encoder_dp", "llm_dp", "expected"),
    [
        (2, 4, [0, 0, 0, 0, 1, 1, 1, 1]),
        (4, 2, [0, 0, 1, 1, 2, 2, 3, 3]),
        (3, 2, [0, 0, 0, 1, 1, 1, 2, 2]),
        (6, 4, [0, 0, 1, 2, 3, 3, 4, 5]),
    ],
)
def test_brokers_join_and_split_in_order(encoder_dp: int, llm_dp: int, expected: list[int]) -> None:
    replica = np.arange(8) // (8 // llm_dp)
    zero = np.zeros(8, np.int64)
    layout = disjoint(encoder_dp, llm_dp, 1)
    found = unit_replicas(replica, zero, place_in_group(replica), layout, slice(0, 1), llm=1)
    assert found is not None
    assert found.tolist() == expected


def test_stage_shares_add_up_and_count_recomputation() -> None:
    layout = disjoint(1, 1, 4)
    profile = profile_of(tiny_job(MODEL), samples((10, [40])))
    encoder, llm = stage_shares(layout, profile)
    for share in (encoder, llm):
        assert share.sum(axis=1).tolist() == pytest.approx([1.0, 2.0])
    assert np.all(encoder[0, 2:] == 0)
    assert np.all(llm[0, :2] == 0)
    again = Layout(
        (placed(MODEL.modules[0], np.array([[[0]]]), recompute=True), placed(MODEL.modules[1], np.array([[[1]]]))), 4
    )
    assert stage_shares(again, profile)[0].sum(axis=1).tolist() == pytest.approx([1.0, 3.0])


# Different DP of encoder and LLM


def test_an_llm_microbatch_ahead_of_its_encoder_microbatch_is_refused() -> None:
    profile, (shapes, layout) = (
        profile_for((500, [200])),
        (samples((10, [40]), (10, []), (10, [40])), chain_layout(MODEL, 1, 1, 2)),
    )
    in_time = Assignment((labels([0, 0], [0, 1]), labels([0, 0, 0], [0, 0, 1])))
    DistTrainScheduler().schedule(shapes, layout, in_time, profile)
    early = Assignment((labels([0, 0], [0, 1]), labels([0, 0, 0], [1, 0, 0])))
    with pytest.raises(IncompatibleError, match="sample 2 is in llm microbatch 0, before its vision microbatch 1"):
        DistTrainScheduler().schedule(shapes, layout, early, profile)


@pytest.mark.wide
def test_reordering_does_not_hurt_on_average() -> None:
    """Mean iteration time of 8 batches of opencqa_ocr with and without both reorderings, same layout."""
    cell = ["strategy=disttrain", "workload=opencqa_ocr", "iterations=8"]
    switched = {}
    for name, knobs in (("both", []), ("none", ["strategy.assigner.intra=none", "strategy.assigner.inter=false"])):
        outcome = run_experiment(compose_cells([*cell, *knobs])[0].config)
        switched[name] = outcome.metrics["iteration_time_s"]
    assert switched["both"] < switched["none"]
