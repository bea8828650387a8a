"""Simulate a program under the cost truth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from entrain_bench.base.arrays import FloatArray
from entrain_bench.base.errors import OutOfMemoryError
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program import Program
from entrain_bench.program.timeline import Timeline
from entrain_bench.program.validate import check_program
from entrain_bench.simulate.place import make_timeline


@dataclass(frozen=True, slots=True)
class Simulator:
    """Executes programs on a simulated clock.

    Attributes:
        truth: the cost truth.
        memory_budget_bytes: memory of a rank that programs may use.
    """

    trains: ClassVar[Literal[False]] = False

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
