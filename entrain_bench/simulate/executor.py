"""Simulate a program under the cost model."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from entrain_bench.base.arrays import FloatArray
from entrain_bench.base.errors import OutOfMemoryError
from entrain_bench.costs.steps import Steps
from entrain_bench.costs.truth import CostTruth, Prices
from entrain_bench.program import Program
from entrain_bench.program.timeline import Timeline
from entrain_bench.program.validate import check_program
from entrain_bench.simulate.engine import place_actions


def place_program(program: Program, prices: Prices) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Start, end and wait for transfers of every action ``[actions]``; see ``place_actions``."""
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
    """When every action of a priced program runs; ``memory`` is as in ``Timeline`` ``[2, entries]``."""
    start, end, wait = place_program(program, prices)
    peak = np.maximum.reduceat(memory[0], program.lane_offsets[:-1])
    return Timeline(program, start, end, prices.comm_s, wait, peak, memory)


def place_steps(
    program: Program, steps: Steps, hold_s: FloatArray, start: FloatArray, end: FloatArray, wait: FloatArray
) -> None:
    """Set start, end and wait of a program's steps ``[actions]``; optimizers wait for the last synchronization."""
    layout = program.layout
    lanes = [blocks.of_stage(stage) for blocks in layout.blocks for stage in range(blocks.num_stages)]
    num_stages = len(lanes)
    first = int(program.first_action[-1])
    computed_s = float(end[:first].max(initial=0.0))
    held = np.where(np.arange(program.num_actions) < first, end + hold_s, 0.0)
    lane_free = np.maximum.reduceat(held[program.lane_actions], program.lane_offsets[:-1])
    links_free = np.zeros(layout.num_lanes)
    synced = np.zeros(num_stages)
    if steps.overlapped:
        for stage in reversed(range(num_stages)):
            ready = (end[steps.last_backwards[stage]] + steps.lag_s[stage]).max(initial=0.0)
            if steps.sync_s[stage]:
                ready = max(ready, float(links_free[lanes[stage]].max()) + steps.sync_s[stage])
                links_free[lanes[stage]] = ready
            synced[stage] = ready
            start[first + stage] = end[first + stage] = ready
    else:
        for stage in range(num_stages):
            start[first + stage] = lane_free[lanes[stage]].max()
            synced[stage] = lane_free[lanes[stage]] = end[first + stage] = start[first + stage] + steps.sync_s[stage]
        computed_s = float(synced.max())
    tied = [max(synced[one], synced[other]) + seconds for one, other, seconds in steps.tied]
    ready_s = max(computed_s, float(synced.max()), *tied)
    optimizer = first + num_stages
    np.maximum(lane_free, ready_s, out=lane_free)
    for stage in range(num_stages):
        begin = float(lane_free[lanes[stage]].max())
        start[optimizer + stage] = begin
        end[optimizer + stage] = lane_free[lanes[stage]] = begin + steps.optimizer_s[stage] + steps.gather_s[stage]
    wait[first:] = 0.0
    waited = np.zeros(layout.num_lanes, bool)
    for stage in range(num_stages):
        if not waited[lanes[stage]].any():
            wait[optimizer + stage] = ready_s - computed_s
        waited[lanes[stage]] = True


@dataclass(frozen=True, slots=True)
class Simulator:
    """Executes programs on a simulated clock; programs may use ``memory_budget_bytes`` of a rank's memory."""

    trains: ClassVar[Literal[False]] = False

    truth: CostTruth
    memory_budget_bytes: float

    def execute(self, program: Program) -> Timeline:
        """Validate and time a program; ``UserError`` for a wrong one, one that does not fit memory, and a deadlock."""
        check_program(program)
        memory = self.check_memory(program)
        return make_timeline(program, self.truth.charge(program), memory)

    def check_memory(self, program: Program) -> FloatArray:
        """Return the memory of the lanes' entries ``[2, entries]``; raise ``OutOfMemoryError`` above the budget."""
        memory = self.truth.memory.over_program(program)
        worst = int(memory[0].argmax())
        need = memory[0, worst]
        if need > self.memory_budget_bytes:
            lane = int(np.searchsorted(program.lane_offsets, worst, side="right")) - 1
            raise OutOfMemoryError(
                f"memory: rank {program.layout.lane_first_rank[lane]} needs {need / 2**30:.1f} GiB at "
                f"{program.view(int(program.lane_actions[worst]))}; "
                f"the budget is {self.memory_budget_bytes / 2**30:.1f} GiB "
                f"(cluster.device.memory_bytes x memory_fraction)"
            )
        return memory
