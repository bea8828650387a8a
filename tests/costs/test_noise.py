"""Noise of executed actions: its size, what fixes it, who knows of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from entrain_bench.balancing.profile import create_profile
from entrain_bench.balancing.schedules import chain_program, stages_behind
from entrain_bench.base.errors import UserError
from entrain_bench.config.compose import compose
from entrain_bench.costs.noise import ActionNoise
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program import Program
from entrain_bench.program.layout import Layout
from entrain_bench.run.experiment import prepare
from entrain_bench.simulate import Simulator
from entrain_bench.specs.shapes import SampleShapes
from support.builders import ListSource, chain_layout, tiny_cluster, tiny_job, tiny_model, uniform_batch

MODEL = tiny_model()
TINY = ("model=tiny", "cluster=tiny", "global_batch=64", "microbatch_size=2", "layout.tp=1", "layout.dp=2")


def program(num_microbatches: int = 4, first_sample: int = 0) -> Program:
    """Two replicas of two stages each."""
    shapes, assignment = uniform_batch(MODEL, num_microbatches, dp=2)
    shapes = replace(shapes, sample_ids=shapes.sample_ids + first_sample)
    layout = chain_layout(MODEL, 2, 2, num_microbatches, dp=2)
    return chain_program(MODEL, shapes, layout, assignment, stages_behind(layout))


def test_factors_have_the_stated_spread_and_steps_have_none() -> None:
    made = program(num_microbatches=256)
    factors = ActionNoise(0.1, seed=3).factors(made)
    passes = factors[made.chunk >= 0]
    assert passes.mean() == pytest.approx(1.0, abs=0.01)
    assert passes.std() == pytest.approx(0.1, rel=0.03)
    assert (passes.min(), passes.max()) == pytest.approx((1 - 0.1 * 3**0.5, 1 + 0.1 * 3**0.5), abs=0.001)
    assert len(np.unique(passes)) == len(passes)
    assert set(factors[made.chunk < 0]) == {1.0}
    # Neighbours have nothing to do with each other.
    assert abs(np.corrcoef(passes[1:], passes[:-1])[0, 1]) < 0.05
    assert ActionNoise(0.5).factors(made).min() > 0


def test_noise_is_charged_and_no_strategy_sees_it() -> None:
    made, job = program(), tiny_job(MODEL)
    exact, noisy = (CostTruth(MODEL, tiny_cluster(), noise=ActionNoise(std, seed=3)) for std in (0.0, 0.2))
    charged = noisy.charge(made)
    np.testing.assert_allclose(charged.duration_s, exact.price(made).duration_s * noisy.noise.factors(made), rtol=1e-15)
    assert np.all(charged.comm_s <= charged.duration_s)
    times = [Simulator(truth, 1e12).execute(made).iteration_time_s for truth in (exact, noisy)]
    assert times[0] != times[1]
    trials = {create_profile(job, truth, ListSource(made.shapes), 0).trial_s(made) for truth in (exact, noisy)}
    assert trials == {times[0]}


def test_a_run_takes_its_noise_from_its_seed_and_plans_as_without() -> None:
    def planned(*overrides: str) -> tuple[Layout, SampleShapes, float]:
        setting = prepare(compose(*TINY, *overrides))
        layout, shapes = setting.strategy.plan(setting.profile), setting.source.batch(0, 64, 0)
        made = setting.strategy.program(shapes, layout, setting.profile)
        return layout, shapes, setting.executor.execute(made).iteration_time_s  # type: ignore[union-attr]

    plain, noisy = planned(), planned("action_noise=0.1")
    assert plain[0].describe() == noisy[0].describe()
    assert plain[2] != noisy[2]
    assert noisy[2] == planned("action_noise=0.1")[2]
    with pytest.raises(UserError, match=r"action_noise=0.1: must be 0 with harness=train"):
        prepare(compose(*TINY, "harness=train", "action_noise=0.1"))
