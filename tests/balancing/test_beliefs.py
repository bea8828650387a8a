"""Estimates of programs: packed chunks, and what follows the passes of a stage until its step."""

from dataclasses import replace

import numpy as np
import pytest

from entrain_bench.balancing.chunk_estimates import packed_chunks_s, packed_iteration_s
from entrain_bench.balancing.estimates import LENGTHS, pack_times, probes
from entrain_bench.balancing.interleaved import ZeroBubbleH1
from entrain_bench.balancing.schedules import chain_program, stages_behind, three_phase_program
from entrain_bench.base.arrays import sum_rows
from entrain_bench.costs.layer_times import PassTimes
from entrain_bench.program.assignment import group_chunks, same_microbatches
from entrain_bench.program.layout import Layout
from entrain_bench.specs.framework import FrameworkOptions
from support.builders import (
    chain_layout,
    placed,
    profile_of,
    samples,
    tiny_cluster,
    tiny_job,
    tiny_model,
    uniform_batch,
)


@pytest.mark.parametrize("setting", [{}, {"overlap_grad_reduce": False}, {"align_param_gather": False}])
def test_a_believed_iteration_ends_when_a_simulated_one_does(setting: dict[str, bool]) -> None:
    """With exact passes on idle links, also where the step takes longer than all passes."""
    model = tiny_model(encoder=2, llm=4, vocab_size=700_000)
    job = tiny_job(model, tiny_cluster(2, 4), framework=FrameworkOptions(**setting))
    profile = profile_of(job, samples((10, [40])))
    layout = chain_layout(model, 1, 2, 4, dp=2)
    shapes, assignment = uniform_batch(model, 4, dp=2)
    program = chain_program(model, shapes, layout, assignment, stages_behind(layout))
    prices = profile._truth.price(program)
    assert profile.programs.iteration_s(program, prices.duration_s) == pytest.approx(profile.trial_s(program), rel=0.01)
    if not setting:
        least = profile._truth.step_costs.exposed(model.llm, layout.modules[1])
        assert profile.programs.exposed_steps(layout)[1].sync_s[0] > 2 * least.sync_s[0]


@pytest.mark.parametrize("setting", [{}, {"overlap_grad_reduce": False}, {"overlap_param_gather": False}])
def test_the_step_of_modules_on_the_same_ranks_is_what_it_adds_to_mean_passes(setting: dict[str, bool]) -> None:
    model = tiny_model(encoder=40, llm=2, vocab_size=700_000)
    job = tiny_job(model, tiny_cluster(2, 4), framework=FrameworkOptions(**setting))
    profile = profile_of(job, samples((10, [40])))
    ranks = [[[0]], [[1]], [[2]], [[3]]]
    layout = Layout(tuple(placed(module, ranks) for module in model.modules), job.global_batch // 4)
    shapes, assignment = uniform_batch(model, 1, dp=4)
    # As many samples as the mean microbatch has.
    assert job.global_batch // (4 * layout.num_microbatches) == 1
    program = three_phase_program(model, shapes, layout, assignment)
    duration_s = profile._truth.price(program).duration_s
    added_s = (
        profile.programs.iteration_s(program, duration_s)
        - profile.programs.simulate(program, duration_s, transfers=True).max()
    )
    assert profile.programs.step_s(layout) == pytest.approx(added_s, rel=0.02)
    one_after_the_other = layout.lane_sums([each.sync_s for each in profile.programs.exposed_steps(layout)]).max()
    assert (profile.programs.lane_steps_s(layout)[1].max() < 0.99 * one_after_the_other) == (
        setting != {"overlap_grad_reduce": False}
    )


def test_gathers_of_sharded_weights_are_believed() -> None:
    model = tiny_model(encoder=2, llm=4, vocab_size=100_000)
    profile = profile_of(tiny_job(model, tiny_cluster(2, 4)), samples((10, [40])))
    ranks = np.arange(4).reshape(4, 1, 1)
    modules = tuple(replace(placed(module, ranks), sharding="zero3") for module in model.modules)
    shapes, assignment = uniform_batch(model, 2, dp=4)
    layout = Layout(modules, 2)
    program = chain_program(model, shapes, layout, assignment, stages_behind(layout))
    whole = replace(program, layout=Layout(tuple(replace(each, sharding="zero1") for each in modules), 2))
    passes_s = profile._truth.price(whole).duration_s
    assert profile.programs.iteration_s(program, passes_s) == pytest.approx(profile.trial_s(program), rel=0.01)
    assert profile.programs.iteration_s(program, passes_s) > 2 * passes_s[program.is_pass].sum() / 4


def test_weight_passes_are_believed() -> None:
    model = tiny_model(encoder=2, llm=4)
    profile = profile_of(tiny_job(model, tiny_cluster(2, 4)), samples((10, [400])))
    layout = chain_layout(model, 1, 2, 4, dp=2)
    shapes, assignment = uniform_batch(model, 4, dp=2)
    program = ZeroBubbleH1().schedule(shapes, layout, assignment, profile)
    assert program.splits_backward(0)
    assert packed_iteration_s(program, profile) == pytest.approx(profile.trial_s(program), rel=0.1)


# A chunk, a token, a token squared.
ONCE_S, TOKEN_S, SCORE_S = 2e-3, 1e-6, 1e-11


def measured() -> list[PassTimes]:
    lengths, offsets = probes()
    forward = ONCE_S + sum_rows(offsets, TOKEN_S * lengths + SCORE_S * lengths.astype(np.float64) ** 2)
    return [PassTimes(0.75 * forward, 0.25 * forward, forward, forward)]


def test_affine_times_are_taken_apart() -> None:
    times = pack_times(measured())
    assert times.chunk_s[:, 0] == pytest.approx([ONCE_S, 2 * ONCE_S])
    added = times.of(LENGTHS)[0, :, 0]
    assert added == pytest.approx(TOKEN_S * LENGTHS + SCORE_S * LENGTHS.astype(np.float64) ** 2)
    others = np.array([(LENGTHS[30] + LENGTHS[31]) // 2, LENGTHS[-1] * 4])
    assert times.of(others)[0, :, 0] == pytest.approx(TOKEN_S * others + SCORE_S * others.astype(np.float64) ** 2)
    assert np.all(times.of(np.array([0, 1, 10**7])) >= 0)
    assert times.least_s[0, 0] == pytest.approx(ONCE_S + TOKEN_S + SCORE_S)


def test_weight_passes_are_taken_apart_like_the_others() -> None:
    (whole,) = measured()
    times = pack_times([replace(whole, weight_s=whole.forward_s / 3)])
    assert times.chunk_s[:, 0] == pytest.approx([ONCE_S, 2 * ONCE_S, ONCE_S / 4])
    added_s = times.of(np.array([1000]))[:, 0, 0]
    assert added_s[2] == pytest.approx(added_s[0] / 4)


@pytest.mark.parametrize("recompute", [False, True])
def test_chunks_take_about_what_they_are_believed_to(recompute: bool) -> None:
    model = tiny_model(encoder=3, llm=3)
    profile = profile_of(tiny_job(model), samples((10, [40])))
    rng = np.random.default_rng(0)
    shapes = samples(*((int(rng.integers(500, 1500)), rng.integers(500, 3000, 2).tolist()) for _ in range(24)))
    zero = np.zeros(24, np.int64)
    assignment = same_microbatches(model, shapes, zero, np.arange(24) // 6, np.arange(24) // 6)
    for module, labels in zip(model.modules, assignment.modules, strict=True):
        layout = placed(module, [[[0], [1]]], recompute=recompute)
        chunks = group_chunks(module, shapes, labels)
        believed = packed_chunks_s(module, layout, shapes, chunks, profile)
        truth = profile._truth.chunk_times(module, layout, shapes, chunks)
        assert believed[0] == pytest.approx(truth.forward_s + truth.forward_comm_s, rel=0.1)
        assert believed[1] == pytest.approx(truth.backward_s + truth.backward_comm_s, rel=0.1)
        # What recomputes by chunk all that it can is what the layout recomputes.
        if recompute:
            from entrain_bench.program.columns import covered_per_stage

            plain = placed(module, [[[0], [1]]])
            most = np.repeat(covered_per_stage(module, plain.layers_per_stage)[None], len(chunks), 0)
            again = packed_chunks_s(module, plain, shapes, chunks, profile, most)
            assert again[1] == pytest.approx(believed[1])
