"""A priced program on the simulated clock."""

from __future__ import annotations

from entrain_bench.arrays import FloatArray
from entrain_bench.costs.truth import Prices
from entrain_bench.program import Program
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
    )
    place_steps(program, prices.steps, prices.hold_s, *times)
    return times
