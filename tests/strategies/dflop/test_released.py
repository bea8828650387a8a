"""The public code's walk, against one written independently as the code's own loops read."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, inf

import numpy as np
import pytest

from entrain_bench.balancing.interface import Strategy
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.schedules import OneForwardOneBackward
from entrain_bench.specs.job import LayoutRequest
from entrain_bench.specs.layer import BF16_BYTES
from entrain_bench.specs.model import ModuleSpec
from entrain_bench_strategies.dflop import DflopAssigner, DflopPlanner
from entrain_bench_strategies.dflop.planner import (
    DflopDegrees,
    enumerate_degrees,
)
from entrain_bench_strategies.dflop.profiling import BOTH_PASSES, DataShapes, data_shapes, encoder_cost, llm_cost
from support.builders import profile_of, samples, tiny_cluster, tiny_job, tiny_model

MODEL = tiny_model(encoder=4, llm=4)
SAMPLES = samples((100, [800]), (300, [400, 200]), (50, []), (900, [1600, 1600, 1600]))
TPS = (1, 2, 4)


def profile_for(budget: float, ranks: int, batch: int, request: LayoutRequest) -> Profile:
    cluster = tiny_cluster(1, ranks)
    device = replace(cluster.device, memory_bytes=int(budget))
    job = tiny_job(MODEL, replace(cluster, device=device), global_batch=batch, request=request)
    return profile_of(job, SAMPLES)


def memory(
    profile: Profile, module: ModuleSpec, tp: int, pp: int, dp: int, tokens: float, in_flight: int, again: bool
) -> float:
    """Bytes of a rank of the largest stage, with the buffer."""
    layers = ceil(len(module.layers) / pp) / len(module.layers)
    state = module.learning_parameters / tp * float(profile.memory.parameter_bytes(np.array([dp]))[0])
    state += module.frozen_parameters / tp * BF16_BYTES
    kept = sum(one.input_bytes_per_token if again else one.activation_bytes_per_token for one in module.layers) / tp
    # States are sharded over ranks, and so shrink with the stage's share of the layers.
    return 1.25 * layers * (state + in_flight * kept * tokens)


def walk(profile: Profile, shapes: DataShapes, again: bool) -> tuple[list[DflopDegrees], list[float]]:
    """The accepted plans in the order of their acceptance, and their T."""
    job = profile.job
    gpus, batch, limit = job.cluster.num_ranks, job.global_batch, job.cluster.device.memory_bytes
    encoder, llm = MODEL.modules
    items, tokens = shapes.items[0], shapes.item_tokens[0]
    flops = float(encoder.forward_flops(np.array([tokens]))[0])
    best_s, best_m, plans, times = inf, inf, list[DflopDegrees](), list[float]()
    tps = [tp for tp in TPS if gpus % tp == 0]
    for v_gpus in range(1, gpus):
        for v_tp in tps:
            for v_pp in range(1, len(encoder.layers) + 1):
                if v_gpus % (v_tp * v_pp):
                    continue
                v_dp = v_gpus // (v_tp * v_pp)
                for l_tp in tps:
                    for l_pp in range(1, len(llm.layers) + 1):
                        if (gpus - v_gpus) % (l_tp * l_pp):
                            continue
                        l_dp = (gpus - v_gpus) // (l_tp * l_pp)
                        if v_dp > batch or l_dp > batch:
                            continue
                        largest = shapes.most_items[0] * tokens * l_dp / v_dp
                        if memory(profile, encoder, v_tp, v_pp, v_dp, largest, v_pp + l_pp, again) > limit:
                            continue
                        if memory(profile, llm, l_tp, l_pp, l_dp, shapes.most_sequence_tokens, l_pp, again) > limit:
                            continue
                        for m in range(1, batch // l_dp + 1):
                            l_mbs, v_mbs = batch / (m * l_dp), batch / (m * v_dp)
                            if l_mbs < 1 or v_mbs < 1:
                                continue
                            few = items * v_mbs <= shapes.most_items[0]
                            if few and shapes.sequence_tokens * l_mbs <= shapes.most_sequence_tokens:
                                break
                        l_mbs, b = batch / (m * l_dp), max(1.0, items * batch / (m * v_dp))
                        v_cost = encoder_cost(profile, encoder, tokens, v_tp)
                        v_s = BOTH_PASSES * flops * b / (float(v_cost.table.at(b)) * v_tp * v_pp)
                        one = np.array([shapes.sequence_tokens])
                        packed = shapes.sequence_tokens * l_mbs
                        l_s = l_mbs * float(llm_cost(profile, llm, l_tp).seconds(one, packed, l_pp)[0])
                        total = (m + v_pp + l_pp - 1) * max(v_s, l_s) * (4 / 3 if again else 1)
                        if total < 1.1 * best_s and m < best_m:
                            best_s, best_m = total, m
                            plans.append(DflopDegrees(v_tp, v_pp, v_dp, l_tp, l_pp, l_dp, m))
                            times.append(total)
    return plans, times


@pytest.mark.wide
@pytest.mark.parametrize("budget", [1e12, 2e7, 1e7])
@pytest.mark.parametrize(("ranks", "batch"), [(8, 64), (6, 50), (8, 5)])
@pytest.mark.parametrize("asked", [None, ()])
def test_the_walk_accepts_what_the_loops_accept(
    budget: float, ranks: int, batch: int, asked: tuple[str, ...] | None
) -> None:
    profile = profile_for(budget, ranks, batch, LayoutRequest(recompute=asked))
    shapes = data_shapes(profile, SAMPLES)
    plans, times = walk(profile, shapes, again=asked is None)
    planner = DflopPlanner(microbatches="released", whole_layers=False)
    ranked = list(planner.rank(profile, shapes))
    assert [plan for _, plan, _ in ranked[: len(plans)]] == plans[::-1]
    np.testing.assert_allclose([seconds for seconds, _, _ in ranked[: len(plans)]], times[::-1])
    assert {again for _, _, again in ranked} == ({(asked is None,) * 2} if ranked else set())
    rest = [seconds for seconds, _, _ in ranked[len(plans) :]]
    assert rest == sorted(rest)
    if budget > 1e9:
        assert plans
        # A given memory drops some plans, and changes nothing about the others.
        assert len(ranked) == len(enumerate_degrees(profile.job, any_dp=True))


def test_an_llm_dp_that_does_not_divide_the_batch_is_walked_and_runs() -> None:
    profile = profile_for(1e12, 8, 50, LayoutRequest(dp=5, tp=1))
    assert 5 in enumerate_degrees(profile.job, any_dp=True)[:, 5]
    free = profile_for(1e12, 8, 50, LayoutRequest())
    assert {3, 7} <= {*enumerate_degrees(free.job, any_dp=True)[:, 5].tolist()}
    assert not {3, 7} & {*enumerate_degrees(free.job)[:, 5].tolist()}
    planner = DflopPlanner(microbatches="released", profile_samples=64)
    layout = Strategy("dflop", planner, DflopAssigner(), OneForwardOneBackward()).plan(free)
    assert layout.num_ranks == 8


def test_several_encoders_share_the_encoders_ranks() -> None:
    model = tiny_model(encoder=2, llm=2, audio=1)
    profile = profile_of(tiny_job(model, tiny_cluster(1, 8), global_batch=32), SAMPLES)
    planner = DflopPlanner(microbatches="released", profile_samples=64)
    layout = Strategy("dflop", planner, DflopAssigner(), OneForwardOneBackward()).plan(profile)
    np.testing.assert_array_equal(layout.modules[0].ranks, layout.modules[1].ranks)
    assert layout.num_ranks == 8
    assert all(placed.recompute for placed in layout.modules)
