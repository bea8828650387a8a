"""DFLOP's adaptive correction: what it learns from executed iterations, when it stops, and that it stays in its run."""

import numpy as np
import pytest

from entrain_bench.balancing.estimates import Observation, shape_classes
from entrain_bench.balancing.interface import Strategy
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.schedules import OneForwardOneBackward
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program.layout import Layout
from entrain_bench.program.timeline import Timeline
from entrain_bench.simulate.executor import Simulator
from entrain_bench_strategies.dflop import Corrector, DflopAssigner, DflopPlanner
from entrain_bench_strategies.dflop.assigner import unit_s
from support.builders import placed, profile_of, random_samples, tiny_cluster, tiny_job, tiny_model

MODEL = tiny_model(encoder=4, llm=4)
CLASSES = np.array([7, 9])


def observation(actual: list[float], predicted: list[list[float]]) -> Observation:
    return Observation(CLASSES, np.array(predicted), np.array(actual), 1)


def biased(factor: float) -> Observation:
    """Microbatches of 1-3 s of each class, of which the second takes ``factor`` times what is predicted."""
    predicted = [[1.0, 3.0], [3.0, 1.0], [2.0, 2.0], [1.0, 1.0]]
    return observation([one + factor * other for one, other in predicted], predicted)


def test_a_biased_class_is_recovered_relative_to_the_other() -> None:
    corrector = Corrector(cost_s=0.01, window=3)
    for _ in range(12):
        corrector = corrector.learn([biased(1.4)])
    assert corrector.active
    ratio = [corrector.ratios[int(one)] for one in CLASSES]
    assert ratio[1] / ratio[0] == pytest.approx(1.4, rel=1e-3)
    np.testing.assert_array_equal(corrector.penalties(np.array([9, 7, 9, 3])), [ratio[1], ratio[0], ratio[1], 1.0])


def test_a_common_factor_and_small_errors_are_left_alone() -> None:
    predicted = [[1.0, 3.0], [3.0, 1.0]]
    common = observation([8.0, 8.0], predicted)
    assert Corrector().learn([common]).penalties(CLASSES).tolist() == [1.0, 1.0]
    corrector = Corrector(cost_s=0.0)
    for _ in range(8):
        corrector = corrector.learn([biased(1.03)])
    assert corrector.ratios[9] != 1.0
    assert corrector.penalties(CLASSES).tolist() == [1.0, 1.0]


def test_a_bias_that_ends_switches_tracking_off_and_penalties_with_it() -> None:
    corrector = Corrector(cost_s=0.01, window=3)
    for factor in (1.5, 1.5, 1.5, 1.5):
        corrector = corrector.learn([biased(factor)])
    assert corrector.active
    assert corrector.penalties(CLASSES)[1] > 1.1
    for _ in range(6):
        corrector = corrector.learn([biased(1.0)])
    assert not corrector.active
    assert corrector.penalties(CLASSES).tolist() == [1.0, 1.0]
    assert corrector.learn([biased(9.0)]) is corrector


# On executed iterations


def setting(belief_bias: float) -> tuple[Profile, Layout]:
    shapes = random_samples(np.random.default_rng(4), 96, longest=4000)
    job = tiny_job(MODEL, tiny_cluster(1, 8), global_batch=96)
    encoder, llm = MODEL.modules
    layout = Layout((placed(encoder, [[[0]], [[1]]]), placed(llm, [[[2], [3]], [[4], [5]]])), 8)
    return profile_of(job, shapes, belief_bias=belief_bias), layout


def execute(strategy: Strategy, profile: Profile, layout: Layout, iteration: int) -> Timeline:
    program = strategy.program(profile.samples._source.batch(iteration, 96, 0), layout, profile)
    return Simulator(CostTruth(MODEL, profile.job.cluster), profile.job.memory_budget_bytes).execute(program)


def test_a_length_bias_of_the_estimates_is_learnt_from_timelines() -> None:
    profile, layout = setting(0.3)
    exact, _ = setting(0.0)
    strategy = Strategy("dflop", DflopPlanner(), DflopAssigner(0.0), OneForwardOneBackward())
    for iteration in range(8):
        strategy = strategy.observe(execute(strategy, profile, layout, iteration), profile)
    assert isinstance(strategy.assigner, DflopAssigner)
    corrector = strategy.assigner.correction
    assert corrector is not None
    assert corrector.active
    shapes = profile.samples._source.batch(20, 96, 0)
    llm, where = MODEL.llm, layout.modules[1]
    right = unit_s(llm, shapes, where, 8, exact)
    wrong = unit_s(llm, shapes, where, 8, profile)
    corrected = wrong * corrector.penalties(shape_classes(shapes.llm_tokens, 1))
    errors = [(seconds / seconds.sum() - right / right.sum()) for seconds in (wrong, corrected)]
    assert np.abs(errors[1]).sum() < 0.5 * np.abs(errors[0]).sum()
