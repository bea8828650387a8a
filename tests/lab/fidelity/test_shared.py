"""Passes on cores that ranks share, by hand and beside the simulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from entrain_bench.costs.truth import CostTruth, Prices
from entrain_bench.lab.fidelity.predict import cores_of_lanes, place_on_cores
from entrain_bench.lab.fidelity.programs import first_program, overrides_of
from entrain_bench.program import Pass, Program
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import prepare
from entrain_bench.simulate import Simulator
from support.builders import chain_layout, tiny_model, two_ranks

MODEL = tiny_model(encoder=2, llm=2)


def priced(program: Program, forward_s: float, backward_s: float, optimizer_s: float) -> Prices:
    """Passes and optimizer steps as given, messages and synchronisation at no cost."""
    cluster = prepare(compose_cells(["model=tiny", "cluster=tiny"])[0].config).job.cluster
    prices = CostTruth(MODEL, cluster).price(program)
    duration_s = np.select([program.kind == Pass.FORWARD, program.kind == Pass.BACKWARD], [forward_s, backward_s])
    steps = prices.steps
    nothing = np.zeros_like(steps.sync_s)
    free = replace(steps, overlapped=False, sync_s=nothing, optimizer_s=nothing + optimizer_s, tied=())
    return replace(prices, duration_s=duration_s, delay_s=np.zeros_like(prices.delay_s), transfers=None, steps=free)


def placed(program: Program, prices: Prices, cores: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    timeline = place_on_cores(program, prices, cores, np.zeros((2, len(program.lane_actions))))
    return timeline.start_s, timeline.end_s


def test_one_microbatch_has_the_core_to_itself() -> None:
    program = two_ranks(MODEL, 1)
    start, end = placed(program, priced(program, 1.0, 2.0, 0.5), [[0], [0]])
    # Forward and backward of the encoder, of the LLM; gradients; optimizers, on the core at the same time.
    assert start[:4].tolist() == [0.0, 4.0, 1.0, 2.0]
    assert end.tolist() == [1.0, 6.0, 2.0, 4.0, 6.0, 4.0, 7.0, 7.0]


def test_two_ranks_that_compute_take_half_a_core_each() -> None:
    program = two_ranks(MODEL, 2)
    prices = priced(program, 1.0, 2.0, 0.0)
    start, end = placed(program, prices, [[0], [0]])
    forward, backward = program.forward_actions(0)[:, 0], program.backward_actions(0)[:, 0]
    llm_forward, llm_backward = program.forward_actions(1)[:, 0], program.backward_actions(1)[:, 0]
    # The encoder's second forward beside the LLM's first: both take 2 s.
    assert (start[forward[1]], end[forward[1]]) == (1.0, 3.0)
    assert (start[llm_forward[0]], end[llm_forward[0]]) == (1.0, 3.0)
    # Then the LLM's first backward alone, and its second forward beside the encoder's first backward.
    assert (start[llm_backward[0]], end[llm_backward[0]]) == (3.0, 5.0)
    assert (start[llm_forward[1]], end[llm_forward[1]]) == (5.0, 7.0)
    # Its second backward shares the core for 1 s of the encoder's work.
    assert (start[backward[0]], end[backward[0]]) == (5.0, 9.0)
    assert (start[llm_backward[1]], end[llm_backward[1]]) == (7.0, 10.0)
    assert (start[backward[1]], end[backward[1]]) == (10.0, 12.0)
    # All work of 12 s, with no moment in which the core has nothing to do.
    assert prices.duration_s.sum() == end.max()


@pytest.mark.wide
@pytest.mark.parametrize("strategy", ["megatron", "entrain", "dflop", "dip"])
def test_with_a_core_for_every_rank_it_is_the_simulator(strategy: str) -> None:
    (cell,) = compose_cells([*overrides_of(4, "uneven", 0, strategy), "cluster.tiers.0.bandwidth_bytes_per_s=1e15"])
    setting, program = first_program(cell.config)
    program = replace(program, layout=replace(program.layout, single_rank_boundary=False))
    simulated = Simulator(setting.truth, 1e12).execute(program)
    assert simulated.memory_bytes is not None
    cores = cores_of_lanes(program.layout, [0, 1, 2, 3])
    alone = place_on_cores(program, setting.truth.price(program), cores, simulated.memory_bytes)
    np.testing.assert_allclose(alone.end_s, simulated.end_s, rtol=1e-6)
    np.testing.assert_array_equal(alone.peak_memory_bytes, simulated.peak_memory_bytes)
    shared = place_on_cores(
        program, setting.truth.price(program), cores_of_lanes(program.layout, [0, 1]), simulated.memory_bytes
    )
    assert 1.05 < shared.iteration_time_s / simulated.iteration_time_s <= 2.0


def test_ranks_take_turns_at_the_cores() -> None:
    layout = chain_layout(MODEL, 2, 2, 4)
    assert cores_of_lanes(layout, [5, 7]) == [[5], [7], [5], [7]]
