"""Steps, prices and transfers worked by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from entrain_bench.balancing.schedules import chain_program, stages_behind
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program import Pass, Program, Slots, build_program
from entrain_bench.program.assignment import ModuleAssignment, group_chunks
from entrain_bench.program.layout import Layout
from entrain_bench.specs.framework import FrameworkOptions
from support.builders import chain_layout, find, placed, samples, tiny_cluster, tiny_model, uniform_batch

# 1e9 bytes/s of memory; pairs at 1e9 bytes/s and 1e-6 s, nodes at 5e8 and 2e-6, the network at 1e8 and 1e-5.
CLUSTER = tiny_cluster(num_nodes=2, gpus_per_node=8)
MODEL = tiny_model()
VISION, LLM = MODEL.modules


# Passes


@pytest.mark.parametrize("split", [False, True])
def test_prices_put_steps_and_passes_where_they_belong(split: bool) -> None:
    layout = chain_layout(MODEL, 1, 2, 4, dp=2)
    shapes, assignment = uniform_batch(MODEL, 4, dp=2)
    behind = stages_behind(layout)
    program = chain_program(MODEL, shapes, layout, assignment, behind, weight_delay=behind if split else None)
    truth = CostTruth(MODEL, CLUSTER, FrameworkOptions(overlap_grad_reduce=False, overlap_param_gather=False))
    prices, costs = truth.price(program), truth.step_costs
    for action in range(program.num_actions):
        view = program.view(action)
        module, place = MODEL.module(view.module), layout.module(view.module)
        expected = 0.0
        if view.kind is Pass.GRAD_SYNC:
            comm = costs.sync_s(module, place)[view.stage]
        elif view.kind is Pass.OPTIMIZER:
            comm = costs.gather_s(module, place)[view.stage]
        else:
            times = truth.unit_times(module, place, module.lengths(shapes, np.array(view.members)), split)
            name = view.kind.name.lower()
            comm = 0.0 if view.kind is Pass.WEIGHT else getattr(times, f"{name}_comm_s")[0, view.stage]
            expected = getattr(times, f"{name}_s")[0, view.stage] + comm
        assert prices.duration_s[action] == pytest.approx(expected, rel=1e-12), str(view)
        assert prices.comm_s[action] == pytest.approx(comm, rel=1e-12), str(view)
    assert prices.comm_s[~program.is_pass].all()
    steps = ~program.is_pass
    assert not CostTruth(MODEL, CLUSTER).price(program).comm_s[steps].any()


# Transfers


def one_sample(encoder: Any, llm: Any) -> Program:
    layout = Layout(
        (placed(VISION, encoder, tp=np.shape(encoder)[2]), placed(LLM, llm, tp=np.shape(llm)[2])), num_microbatches=1
    )
    shapes = samples((10, [40]))
    zero = np.zeros(1, np.int64)
    chunks = [group_chunks(m, shapes, ModuleAssignment(zero.copy(), zero.copy())) for m in MODEL.modules]
    slots = [Slots(np.zeros((1, m.pp), np.int64), np.ones((1, m.pp), np.int64)) for m in layout.modules]
    return build_program(MODEL, layout, shapes, chunks, slots)


def handover(encoder: Any, llm: Any) -> tuple[float, float]:
    """Delay from encoder to LLM in forward, and back."""
    program = one_sample(encoder, llm)
    delay = CostTruth(MODEL, CLUSTER).price(program).delay_s
    ahead = find(program, "llm", Pass.FORWARD, 0, [0])
    back = find(program, "vision", Pass.BACKWARD, len(encoder[0]) - 1, [0])
    (first,) = range(program.dep_offsets[ahead], program.dep_offsets[ahead + 1])
    (second,) = range(program.dep_offsets[back], program.dep_offsets[back + 1])
    return float(delay[first]), float(delay[second])


# 40 encoder tokens become 10 LLM tokens of 128 x 2 bytes.
BYTES = 2560


@pytest.mark.parametrize(
    ("encoder", "llm", "ahead", "back"),
    [
        ([[[0]]], [[[0]]], 0.0, 0.0),
        ([[[4, 5]]], [[[4, 5]]], 0.0, 0.0),
        ([[[0]]], [[[1]]], 1e-6 + BYTES / 1e9, 1e-6 + BYTES / 1e9),
        ([[[1]]], [[[2]]], 2e-6 + BYTES / 5e8, 2e-6 + BYTES / 5e8),
        ([[[0]]], [[[8]]], 1e-5 + BYTES / 1e8, 1e-5 + BYTES / 1e8),
        # two ranks send to two
        ([[[0, 1]]], [[[2, 3]]], 2e-6 + BYTES / 2 / 5e8, 2e-6 + BYTES / 2 / 5e8),
        # one rank to two: one link, then the pair gathers the halves; back, nothing to gather on one rank
        ([[[0]]], [[[2, 3]]], 2e-6 + BYTES / 5e8 + 1e-6 + BYTES / 2 / 1e9, 2e-6 + BYTES / 5e8),
        ([[[2, 3]]], [[[0]]], 2e-6 + BYTES / 5e8, 2e-6 + BYTES / 5e8 + 1e-6 + BYTES / 2 / 1e9),
        # colocated on some of the same ranks is still a transfer
        ([[[0]]], [[[0, 1]]], 1e-6 + BYTES / 1e9 + 1e-6 + BYTES / 2 / 1e9, 1e-6 + BYTES / 1e9),
    ],
)
def test_handover_by_hand(encoder: Any, llm: Any, ahead: float, back: float) -> None:
    assert handover(encoder, llm) == pytest.approx((ahead, back), rel=1e-12, abs=0.0)
