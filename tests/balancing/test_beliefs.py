"""Beliefs: what follows the passes of a stage until its gradients are synchronised."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from entrain_bench.balancing.chunk_estimates import packed_iteration_s, sync_after_s
from entrain_bench.balancing.interleaved import ZeroBubbleH1
from entrain_bench.balancing.schedules import chain_program, stages_behind, three_phase_program
from entrain_bench.program.layout import Layout, ModuleLayout
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
    modules = tuple(replace(placed(module, ranks), sharded=True) for module in model.modules)
    shapes, assignment = uniform_batch(model, 2, dp=4)
    layout = Layout(modules, 2)
    program = chain_program(model, shapes, layout, assignment, stages_behind(layout))
    whole = replace(program, layout=Layout(tuple(replace(each, sharded=False) for each in modules), 2))
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


@pytest.mark.parametrize("overlapped", [True, False])
def test_overlapped_synchronisations_go_on_beside_other_modules(overlapped: bool) -> None:
    model = tiny_model(encoder=2, llm=4)
    framework = FrameworkOptions(overlap_grad_reduce=overlapped)
    profile = profile_of(tiny_job(model, tiny_cluster(1, 8), framework=framework), samples((10, [40])))
    vision, llm = model.modules
    # Two replicas: the encoder on the ranks of the LLM's first stage.
    shared = ModuleLayout(vision.name, 1, 1, (len(vision.layers),), np.array([[[0]], [[2]]]))
    chain = ModuleLayout(llm.name, 1, 1, (3, len(llm.layers) - 3), np.array([[[0], [1]], [[2], [3]]]))
    layout = Layout((shared, chain), 4)
    shapes, assignment = uniform_batch(model, 4, dp=2)
    program = three_phase_program(model, shapes, layout, assignment)
    after = sync_after_s(program, profile)
    (encoder,), (first, last) = (each.sync_s for each in profile.programs.exposed_steps(layout))
    assert min(encoder, first, last) > 0
    both = encoder + first
    expected = (encoder, first, last) if overlapped else (both, both, last)
    assert after[program.backward_actions(0)] == pytest.approx(expected[0])
    assert after[program.backward_actions(1)[:, 0]] == pytest.approx(expected[1])
    assert after[program.backward_actions(1)[:, 1]] == pytest.approx(expected[2])
