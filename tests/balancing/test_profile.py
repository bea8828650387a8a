"""What strategies may know: draws, measurements, fits and estimates with a chosen error."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_bench.balancing.estimates import LayerProfile, smoothed_over_lengths
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.schedules import chain_program, stages_behind
from entrain_bench.base.arrays import IntArray
from entrain_bench.costs.edges import held_s
from entrain_bench.costs.layer_times import PassTimes
from entrain_bench.costs.truth import CostTruth
from entrain_bench.simulate import Simulator
from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.specs.model import ModelSpec, ModuleSpec
from entrain_bench.specs.shapes import shapes_from_lists
from support.builders import (
    chain_layout,
    profile_of,
    random_samples,
    samples,
    tiny_cluster,
    tiny_job,
    tiny_model,
    uniform_batch,
)

MODEL = tiny_model(encoder=2, llm=3, audio=2)
JOB = tiny_job(MODEL)
VISION, AUDIO, LLM = MODEL.modules
SHAPES = shapes_from_lists(
    ["image", "audio"],
    [
        (50, [("image", 400, 100), ("audio", 90, 45), ("image", 64, 16)]),
        (500, []),
        (10, [("audio", 3000, 1500)]),
        (20, [("image", 12000, 3000)]),
    ],
)


@pytest.fixture
def quadratic(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[float, float, float]]:
    """Make every layer's forward an exact quadratic of its kind: a x^2 + b x + c, part of it communication."""
    coefficients = {"embed": (0.0, 3e-7, 1e-5), "block": (2e-11, 5e-7, 4e-5), "head": (0.0, 9e-7, 0.0)}

    def measure(
        _layers: LayerProfile, module: ModuleSpec, lengths: IntArray, _tp: int, _cp: int, _groups: IntArray | None
    ) -> list[PassTimes]:
        x = float(np.sum(lengths))
        times = []
        for kind in module.kinds:
            a, b, c = coefficients[kind.kind]
            whole = np.array([a * x * x + b * x + c])
            times.append(PassTimes(0.75 * whole, 0.25 * whole, 9 * whole, 9 * whole))
        return times

    monkeypatch.setattr(LayerProfile, "measure", measure)
    return coefficients


def whole_module(coefficients: dict[str, tuple[float, float, float]], module: ModuleSpec, x: float) -> float:
    total = 0.0
    for layer in module.layers:
        a, b, c = coefficients[layer.kind]
        total += a * x * x + b * x + c
    return total


def test_estimates_of_a_quadratic_cost_are_exact(quadratic: dict[str, tuple[float, float, float]]) -> None:
    profile = profile_of(JOB, SHAPES)
    for module in MODEL.modules:
        estimate = profile.estimates.units(module, SHAPES, 1, 1)
        lengths = module.lengths(SHAPES, module.units(SHAPES))
        expected = [whole_module(quadratic, module, float(x)) for x in lengths]
        assert estimate == pytest.approx(expected, rel=1e-6)
    encoder, llm = profile.estimates.samples(SHAPES, 1, 1)
    by_hand = [
        whole_module(quadratic, VISION, 400) + whole_module(quadratic, VISION, 64) + whole_module(quadratic, AUDIO, 90),
        0.0,
        whole_module(quadratic, AUDIO, 3000),
        whole_module(quadratic, VISION, 12000),
    ]
    assert encoder == pytest.approx(by_hand, rel=1e-6)
    assert llm == pytest.approx([whole_module(quadratic, LLM, x) for x in (211, 500, 1510, 3020)], rel=1e-6)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 1000), st.sampled_from([0.05, 0.2, 0.9]))
def test_estimates_differ_by_at_most_the_error_and_the_same_way_each_time(seed: int, other: int, error: float) -> None:
    shapes = random_samples(np.random.default_rng(other), 40)
    model = tiny_model()
    job = tiny_job(model)
    exact = profile_of(job, shapes, seed=seed)
    wrong = profile_of(job, shapes, seed=seed, belief_error=error)
    for module in model.modules:
        true, believed = exact.estimates.units(module, shapes, 1, 1), wrong.estimates.units(module, shapes, 1, 1)
        known = true > 0
        ratio = believed[known] / true[known]
        assert np.all(np.abs(ratio - 1.0) <= error * (1 + 1e-9))
        assert np.array_equal(believed, wrong.estimates.units(module, shapes, 1, 1))
        again = profile_of(job, shapes, seed=seed, belief_error=error)
        again.samples.draw(7)
        assert np.array_equal(believed, again.estimates.units(module, shapes, 1, 1))
    # The same sample elsewhere in another batch.
    shuffled = np.random.default_rng(other).permutation(40)
    whole, part = wrong.estimates.samples(shapes, 1, 1), wrong.estimates.samples(shapes.take(shuffled[:11]), 1, 1)
    for before, after in zip(whole, part, strict=True):
        assert after == pytest.approx(before[shuffled[:11]], rel=1e-12)


def errors(module: str, count: int = 2000, seed: int = 0, model: ModelSpec = MODEL) -> np.ndarray:
    shapes = shapes_from_lists(["image", "audio"], [(1000, [("image", 4000, 1000), ("audio", 4000, 2000)])] * count)
    job = tiny_job(model)
    spec = model.module(module)
    believed, true = (profile_of(job, shapes, seed, error).estimates.units(spec, shapes, 1, 1) for error in (0.2, 0.0))
    return np.asarray(believed / true - 1.0)


def test_errors_are_uniform_unbiased_and_independent() -> None:
    vision, llm = errors("vision"), errors("llm")
    for error in (vision, llm):
        assert abs(error.mean()) < 0.01
        assert error.std() == pytest.approx(0.2 / np.sqrt(3), rel=0.05)
        assert len(np.unique(error)) == len(error)
        assert abs(np.corrcoef(error[1:], error[:-1])[0, 1]) < 0.1
    assert abs(np.corrcoef(vision, llm)[0, 1]) < 0.1
    assert abs(np.corrcoef(vision, errors("vision", seed=1))[0, 1]) < 0.1


def test_draws_are_new_each_time_and_repeat_with_the_seed() -> None:
    shapes = random_samples(np.random.default_rng(1), 200)

    def ids(profile: Profile) -> list[int]:
        return [int(sample) for sample in profile.samples.draw(50).sample_ids]

    one, same, other = (profile_of(JOB, shapes, seed=seed) for seed in (3, 3, 4))
    first = ids(one)
    assert first == ids(same)
    assert first != ids(one)
    assert first != ids(other)


def test_the_bias_depends_on_length_alone_and_turns_around_over_two_octaves() -> None:
    text = samples((64, []), (64, []), (256, []), (1024, []))
    exact, wrong = (profile_of(JOB, text, belief_bias=bias).estimates.samples(text, 1, 1)[1] for bias in (0.0, 0.2))
    ratio = wrong / exact - 1
    assert ratio[0] == ratio[1] != 0
    np.testing.assert_allclose(ratio[2], -ratio[0])
    np.testing.assert_allclose(ratio[3], ratio[0])
    assert abs(ratio[0]) <= 0.2
    other = profile_of(JOB, text, seed=1, belief_bias=0.2).estimates.error_factor(JOB.model.llm, text)
    assert not np.allclose(other, wrong / exact)


def test_smoothed_estimates_lose_errors_of_samples_and_keep_those_of_lengths() -> None:
    lengths = np.tile([64, 100, 1024, 1400], 500)
    text = shapes_from_lists([], [(int(length), []) for length in lengths])
    llm = JOB.model.llm
    exact, biased, wrong = (
        profile_of(JOB, text, belief_bias=bias, belief_error=error)
        for bias, error in ((0.0, 0.0), (0.3, 0.0), (0.3, 0.3))
    )
    # Not one bit changes where nothing is wrong.
    assert np.array_equal(exact.smoothed().estimates.error_factor(llm, text), exact.estimates.error_factor(llm, text))
    of_length, of_sample = biased.estimates.error_factor(llm, text), wrong.estimates.error_factor(llm, text)
    smooth = wrong.smoothed().estimates.error_factor(llm, text)
    assert np.abs(of_sample / of_length - 1).max() > 0.25
    np.testing.assert_allclose(smooth, of_length, atol=0.06)
    assert len({*smooth.tolist()}) == 4
    # The profile itself is as before.
    assert np.array_equal(wrong.estimates.error_factor(llm, text), of_sample)


def test_means_over_lengths_are_those_of_neighbors_half_an_octave_apart() -> None:
    # 64 and 128 are two steps apart.
    values = smoothed_over_lengths(np.array([1.0, 3.0, 7.0, 5.0]), np.array([64, 64, 128, 128]))
    assert values.tolist() == [2.0, 2.0, 6.0, 6.0]
    # 80 lies 0.64 of a step above 64: it has so much of its own value, and so little of the mean at 64.
    share = 2 * np.log2(80 / 64)
    near = smoothed_over_lengths(np.array([2.0, 4.0]), np.array([64, 80]))
    left = (2.0 + (1 - share) * 4.0) / (2 - share)
    np.testing.assert_allclose(near, [left, left + share * (4.0 - left)])


def test_estimates_of_a_batch_are_kept_and_cannot_be_changed() -> None:
    profile = profile_of(JOB, SHAPES)
    first = profile.estimates.units(LLM, SHAPES, 1, 1)
    assert profile.estimates.units(LLM, SHAPES, 1, 1) is first
    other = SHAPES.take(np.array([1, 0, 2, 3]))
    assert profile.estimates.units(LLM, other, 1, 1).tolist() == first[[1, 0, 2, 3]].tolist()
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 1.0


def test_a_trial_is_the_simulation_of_a_program() -> None:
    model = tiny_model(encoder=2, llm=4)
    job = tiny_job(model, tiny_cluster(1, 8))
    profile = profile_of(job, samples((10, [40])))
    layout = chain_layout(model, 1, 2, 4)
    shapes, assignment = uniform_batch(model, 4)
    program = chain_program(model, shapes, layout, assignment, stages_behind(layout))
    truth = CostTruth(model, job.cluster)
    expected = Simulator(truth, job.memory_budget_bytes).execute(program).iteration_time_s
    assert profile.trial_s(program) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("p2p", ["blocking", "overlapped"])
def test_handovers_are_what_the_truth_charges_for_transfers(p2p: str) -> None:
    model = tiny_model(encoder=2, llm=4)
    profile = profile_of(tiny_job(model, tiny_cluster(1, 8), framework=FrameworkOptions(p2p=p2p)), samples((10, [40])))
    layout = chain_layout(model, 1, 2, 4, dp=2)
    shapes, assignment = uniform_batch(model, 4, dp=2)
    program = chain_program(model, shapes, layout, assignment, stages_behind(layout))
    prices, handed = profile._truth.price(program), profile.programs.handovers(program)
    assert held_s(program, handed.send_s, handed.receive_s) == pytest.approx(prices.hold_s)
    assert handed.delay_s.max() > 0
    if p2p == "blocking":
        assert handed.delay_s == pytest.approx(prices.delay_s)
        # Actions that take as long as they do then end when they do, but for the gather of weights and the steps.
        passes = slice(int(program.first_action[-1]))
        free = profile.programs.simulate(program, prices.duration_s)[passes]
        held = profile.programs.simulate(program, prices.duration_s, transfers=True)[passes]
        assert np.all(held >= free)
        assert held.max() > free.max()
