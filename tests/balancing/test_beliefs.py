"""Beliefs: what follows the passes of a stage until its gradients are synchronised."""

from __future__ import annotations

import numpy as np
import pytest

from entrain_bench.balancing.beliefs import sync_after_s
from entrain_bench.balancing.schedules import three_phase_program
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.specs.framework import FrameworkOptions
from support.builders import profile_of, samples, tiny_cluster, tiny_job, tiny_model, uniform_batch


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
    (encoder,), (first, last) = (each.sync_s for each in profile.exposed_steps(layout))
    assert min(encoder, first, last) > 0
    both = encoder + first
    expected = (encoder, first, last) if overlapped else (both, both, last)
    assert after[program.backward_actions(0)] == pytest.approx(expected[0])
    assert after[program.backward_actions(1)[:, 0]] == pytest.approx(expected[1])
    assert after[program.backward_actions(1)[:, 1]] == pytest.approx(expected[2])
