"""Timelines: when every action of a program ran. Metrics and figures read nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from entrain_bench.base.arrays import FloatArray
from entrain_bench.program import Program


@dataclass(frozen=True, slots=True)
class Timeline:
    """Start and end of every action of an executed iteration, in seconds from its start.

    Attributes:
        comm_s: seconds of collective communication inside each action ``[actions]``.
        transfer_wait_s: seconds that each action waited for the transfer of data already computed ``[actions]``.
        peak_memory_bytes: highest device memory of a rank of each lane ``[lanes]``.
        memory_bytes: memory of a rank during and after each entry of ``lane_actions`` ``[2, entries]``; None: unknown.
    """

    program: Program
    start_s: FloatArray
    end_s: FloatArray
    comm_s: FloatArray
    transfer_wait_s: FloatArray
    peak_memory_bytes: FloatArray
    memory_bytes: FloatArray | None = None

    @property
    def iteration_time_s(self) -> float:
        """Seconds from the end of the previous optimizer step to the last end of this iteration."""
        return float(self.end_s.max())
