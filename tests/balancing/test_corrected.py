"""Estimates corrected by executed iterations, for assigners that do not learn themselves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from entrain_bench.balancing.corrected import CorrectedAssigner
from entrain_bench.balancing.correction import Corrector
from entrain_bench.balancing.interface import Observer, Strategy
from entrain_bench.balancing.profile import Profile
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program.layout import Layout
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import prepare
from entrain_bench.simulate.executor import Simulator
from support.braid import BRAID, MODEL, layout_of, shape
from support.builders import profile_of, random_samples, tiny_cluster, tiny_job

SAMPLES = random_samples(np.random.default_rng(4), 256, longest=4000)


def profile_with(**wrong: float) -> Profile:
    return profile_of(tiny_job(MODEL, tiny_cluster(1, 8), global_batch=64), SAMPLES, **wrong)


def layout_in(kind: str) -> Layout:
    exact = profile_with()
    layout = BRAID.plan(exact) if kind == "groups" else layout_of(exact, shape(tp=1, pp=4, encoder_tp=1))
    assert bool(layout.modules[0].widths) == (kind == "groups")
    return layout


def learnt(profile: Profile, layout: Layout, iterations: int = 24) -> Strategy:
    truth, budget = CostTruth(MODEL, profile.job.cluster), profile.job.memory_budget_bytes
    corrector = Corrector(cost_s=0.0, window=100)
    strategy = replace(BRAID, assigner=CorrectedAssigner(BRAID.assigner, corrector))
    for iteration in range(iterations):
        program = strategy.program(profile._source.batch(iteration, 64, 0), layout, profile)
        strategy = strategy.observe(Simulator(truth, budget).execute(program), profile)
    return strategy


@pytest.mark.parametrize("kind", ["groups", "pipelines"])
def test_a_bias_by_length_is_taken_out_of_all_estimates(kind: str) -> None:
    exact, profile, layout = profile_with(), profile_with(belief_bias=0.3), layout_in(kind)
    assigner = learnt(profile, layout).assigner
    assert isinstance(assigner, CorrectedAssigner)
    shapes, corrected = profile._source.batch(20, 64, 0), profile.corrected(assigner.correction)
    for module in MODEL.modules:
        right = exact.estimate_units(module, shapes, 1, 1)
        wrong, better = (own.estimate_units(module, shapes, 1, 1) / right for own in (profile, corrected))
        # A common factor of a module changes no deal.
        before, after = (
            np.average(np.abs(own / np.average(own, weights=right) - 1), weights=right) for own in (wrong, better)
        )
        assert after < 0.6 * before, module.name


def test_right_estimates_give_the_deals_of_the_base_to_the_last_bit() -> None:
    profile, layout = profile_with(), layout_in("groups")
    strategy = learnt(profile, layout, 3)
    shapes = profile._source.batch(20, 64, 0)
    made = strategy.assigner.assign(shapes, layout, profile)
    for own, base in zip(made.modules, BRAID.assigner.assign(shapes, layout, profile).modules, strict=True):
        assert np.array_equal(own.replica, base.replica)
        assert np.array_equal(own.microbatch, base.microbatch)


def test_what_a_profile_is_taught_does_not_change_it() -> None:
    profile, shapes = profile_with(), SAMPLES
    before = profile.estimate_units(MODEL.llm, shapes, 1, 1).copy()
    ratios = dict.fromkeys(range(128, 256), 2.0)
    assert np.array_equal(
        profile.corrected(Corrector(ratios=ratios)).estimate_units(MODEL.llm, shapes, 1, 1), 2 * before
    )
    assert np.array_equal(profile.estimate_units(MODEL.llm, shapes, 1, 1), before)
    assert profile.corrected(Corrector()) is profile


@pytest.mark.parametrize("name", ["braid", "orchmllm"])
def test_it_is_a_choice_of_assigner(name: str) -> None:
    (cell,) = compose_cells([f"strategy={name}", f"strategy/assigner={name}_corrected"])
    assigner = prepare(cell.config).strategy.assigner
    assert isinstance(assigner, CorrectedAssigner)
    assert isinstance(assigner, Observer)
    assert assigner.handles_widths == getattr(assigner.base, "handles_widths", False)
    assert assigner.handles_generators == getattr(assigner.base, "handles_generators", False)
