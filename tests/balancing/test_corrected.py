"""Estimates corrected by executed iterations, for assigners that do not learn themselves."""

from dataclasses import replace

import numpy as np
import pytest

from entrain_bench.balancing.corrected import CorrectedAssigner
from entrain_bench.balancing.estimates import Corrector, Observation, shape_classes
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.rounds import layouts_with_widths
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program.layout import Layout
from entrain_bench.simulate.executor import Simulator
from support.braid import BRAID, MODEL, chain_of
from support.builders import profile_of, random_samples, tiny_cluster, tiny_job

SAMPLES = random_samples(np.random.default_rng(4), 2048, longest=4000)
LAYOUTS = ["groups", "pipelines"]


def profile_with(**wrong: float) -> Profile:
    return profile_of(tiny_job(MODEL, tiny_cluster(1, 8), global_batch=64), SAMPLES, **wrong)


def layout_in(kind: str) -> Layout:
    exact = profile_with()
    if kind == "pipelines":
        return chain_of(exact)
    return next(layouts_with_widths(exact.job))


def learnt(profile: Profile, layout: Layout, iterations: int = 24, slower: float = 1.0) -> Corrector:
    """What is learned on a machine that takes so many times as long as the profile's."""
    executor = Simulator(CostTruth(MODEL, profile.job.cluster), profile.job.memory_budget_bytes)
    corrector = Corrector(cost_s=0.0, window=100)
    strategy = replace(BRAID, assigner=CorrectedAssigner(BRAID.assigner, corrector))
    for iteration in range(iterations):
        program = strategy.program(profile.samples._source.batch(iteration, 64, 0), layout, profile)
        timeline = executor.execute(program)
        times = {"start_s": slower * timeline.start_s, "end_s": slower * timeline.end_s}
        strategy = strategy.observe(replace(timeline, **times), profile)
    assert isinstance(strategy.assigner, CorrectedAssigner)
    assert strategy.assigner.correction.ratios
    return strategy.assigner.correction


def test_classes_are_half_octaves_of_length() -> None:
    assert shape_classes(np.array([0, 1, 2, 3, 4, 1024]), 0).tolist() == [0, 0, 2, 3, 4, 20]
    assert shape_classes(np.array([3]), 2).tolist() == [2 * 128 + 3]


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_bias_by_length_is_taken_out_of_all_estimates(kind: str) -> None:
    exact, profile = profile_with(), profile_with(belief_bias=0.3)
    corrected = profile.corrected(learnt(profile, layout_in(kind)))
    for module in MODEL.modules:
        right = exact.estimates.units(module, SAMPLES, 1, 1)
        ratios = [own.estimates.units(module, SAMPLES, 1, 1) / right for own in (profile, corrected)]
        # A common factor of a module changes no deal.
        mean = [np.average(ratio, weights=right) for ratio in ratios]
        before, after = (
            np.average(np.abs(ratio / own - 1), weights=right) for ratio, own in zip(ratios, mean, strict=True)
        )
        assert after < 0.6 * before, module.name


@pytest.mark.parametrize("slower", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_right_estimates_give_the_deals_of_the_base_to_the_last_bit(kind: str, slower: float) -> None:
    profile, layout = profile_with(), layout_in(kind)
    assigner = CorrectedAssigner(BRAID.assigner, learnt(profile, layout, 3, slower))
    shapes = profile.samples._source.batch(20, 64, 0)
    made, expected = (own.assign(shapes, layout, profile).modules for own in (assigner, BRAID.assigner))
    for own, base in zip(made, expected, strict=True):
        assert np.array_equal(own.replica, base.replica)
        assert np.array_equal(own.microbatch, base.microbatch)


@pytest.mark.parametrize("actual", [0.0, 1.0])
def test_units_that_are_believed_to_take_no_time_teach_nothing(actual: float) -> None:
    nothing = Observation(np.array([3]), np.zeros((2, 1)), np.full(2, actual), 1)
    known = Observation(np.array([130, 131]), np.eye(2), np.array([1.0, 2.0]), 1)
    ratios = Corrector().learn([nothing, known], 1.0).ratios
    assert ratios.keys() == {130, 131}
    assert np.isfinite([*ratios.values()]).all()
