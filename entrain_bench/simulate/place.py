"""A priced program on the simulated clock."""

from __future__ import annotations

import numpy as np

from entrain_bench.base.arrays import FloatArray
from entrain_bench.costs.truth import Prices
from entrain_bench.program import Program
from entrain_bench.program.timeline import Timeline
from entrain_bench.simulate.engine import place_actions
from entrain_bench.simulate.steps import place_steps


def place_program(program: Program, prices: Prices) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Start and end of every action, and how long each waited for transfers alone ``[actions]``.

    Raises:
        DeadlockError: naming the cycle of lanes that wait for each other.
    """
    times = place_actions(
        program,
        prices.duration_s,
        prices.delay_s,
        prices.transfers,
        prices.hold_s,
        prices.release_s,
        prices.stall_s,
        prices.together,
    )
    place_steps(program, prices.steps, prices.hold_s, *times)
    return times


def make_timeline(program: Program, prices: Prices, memory: FloatArray) -> Timeline:
    """When every action of a priced program runs.

    ``memory`` is of a rank during and after each entry of ``program.lane_actions`` ``[2, entries]``.

    Raises:
        DeadlockError: naming the cycle of lanes that wait for each other.
    """
    start, end, wait = place_program(program, prices)
    peak = np.maximum.reduceat(memory[0], program.lane_offsets[:-1])
    return Timeline(program, start, end, prices.comm_s, wait, peak, memory)
