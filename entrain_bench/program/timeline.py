"""Timelines: when every action of a program ran. Metrics and figures read nothing else."""

from dataclasses import dataclass

from entrain_bench.base.arrays import FloatArray
from entrain_bench.program import Program


@dataclass(frozen=True, slots=True)
class Timeline:
    """Start and end of every action of an executed iteration ``[actions]``, in seconds from its start."""

    program: Program
    start_s: FloatArray
    end_s: FloatArray
    comm_s: FloatArray  # of collective communication inside each action
    transfer_wait_s: FloatArray  # that each action waited for the transfer of data already computed
    peak_memory_bytes: FloatArray  # of a rank of each lane ``[lanes]``
    memory_bytes: FloatArray | None = None  # of a rank during and after each entry of ``lane_actions`` ``[2, entries]``

    @property
    def iteration_time_s(self) -> float:
        """Seconds from the end of the previous optimizer step to the last end of this iteration."""
        return float(self.end_s.max())
