"""Expert parallelism in programs: which chunks meet in every layer, and how long they then last.

Ranks of an expert-parallel group exchange tokens in every layer with experts, so they go through it together: they wait
for the slowest attention, and share the experts' work evenly. If a group spans replicas, chunks of the same microbatch
and part meet, in each pass.
"""

from dataclasses import replace

import numpy as np

from entrain_bench.base.arrays import IntArray, numbered
from entrain_bench.costs.layer_times import PassTimes
from entrain_bench.costs.loads import Loads
from entrain_bench.program.assignment import Chunks
from entrain_bench.program.layout import ModuleLayout


def meeting_chunks(placed: ModuleLayout, chunks: Chunks) -> IntArray | None:
    """Number of the meeting of each chunk ``[chunks]``; None if no group spans replicas."""
    if placed.expert_span == 1 or not len(chunks):
        return None
    return numbered(chunks.replica // placed.expert_span, chunks.microbatch, chunks.part)


def shared_out(loads: Loads, placed: ModuleLayout, meeting: IntArray | None) -> Loads:
    """The loads with the tokens of experts shared out among the replicas that meet; absent ones bring none."""
    if meeting is None:
        return loads
    total = np.bincount(meeting, loads.tokens)
    return replace(loads, routed=total[meeting] / placed.expert_span)


def in_step(times: PassTimes, meeting: IntArray | None) -> PassTimes:
    """The times of chunks that meet: all last as long as the longest of them ``[chunks, stages]``.

    Weight passes exchange nothing, so each has its own.
    """
    if meeting is None:
        return times
    columns = []
    for column in times.columns[:4]:
        longest = np.zeros((int(meeting.max()) + 1, column.shape[1]))
        np.maximum.at(longest, meeting, column)
        columns.append(longest[meeting])
    forward, comm, backward, backward_comm = columns
    return PassTimes(forward, comm, backward, backward_comm, times.weight_s)
