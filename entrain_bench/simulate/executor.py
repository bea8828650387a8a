"""Simulate a program under the cost truth."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from entrain_bench.costs.truth import CostTruth
from entrain_bench.errors import OutOfMemoryError
from entrain_bench.program import Program
from entrain_bench.program.validate import check_program
from entrain_bench.simulate.engine import place_actions
from entrain_bench.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Simulator:
    """Executes programs on a simulated clock.

    Attributes:
        truth: the cost truth.
        memory_budget_bytes: memory of a rank that programs may use.
    """

    truth: CostTruth
    memory_budget_bytes: float

    def execute(self, program: Program) -> Timeline:
        """Validate and time a program.

        Raises:
            UserError: if a unit is lost or repeated, or an action is misplaced.
            OutOfMemoryError: naming rank, action, need and budget.
            DeadlockError: naming the cycle.
        """
        check_program(program)
        peak = self.check_memory(program)
        prices = self.truth.price(program)
        start, end, wait = place_actions(program, prices.duration_s, prices.delay_s)
        return Timeline(program, start, end, prices.comm_s, wait, peak)

    def check_memory(self, program: Program) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Peak memory of each lane; raises ``OutOfMemoryError`` if one exceeds the budget."""
        memory = self.truth.memory
        held = memory.over_program(program)
        peak = np.maximum.reduceat(held, program.lane_offsets[:-1])
        worst = int(peak.argmax())
        if peak[worst] > self.memory_budget_bytes:
            first, last = program.lane_offsets[worst : worst + 2]
            action = program.lane_actions[first + int(held[first:last].argmax())]
            raise OutOfMemoryError(
                f"memory: rank {program.layout.lane_first_rank[worst]} needs {peak[worst] / 2**30:.1f} GiB at "
                f"{program.view(action)}; the budget is {self.memory_budget_bytes / 2**30:.1f} GiB "
                f"(cluster.device.memory_bytes x memory_fraction)"
            )
        return peak
