"""The LLM microbatch of each encoder sub-microbatch, so that systems with finer microbatches can be compared."""

from __future__ import annotations

import numpy as np

from entrain_bench.base.arrays import IntArray
from entrain_bench.program.columns import Program


def parent_microbatches(program: Program, module: int) -> IntArray:
    """The microbatch that each chunk of a module counts as ``[chunks]``: its own, or its parent where it is a part.

    An encoder's microbatches are parts of the LLM's (DIP, arXiv:2504.14145) where each feeds exactly one, of its own
    replica. Where any feeds several (deferral, windows of the batch) they are microbatches in their own right.
    """
    model = program.model
    shapes = program.shapes
    chunks = program.chunks[module]
    llm = program.chunks[model.llm_index]
    groups = [placed.copies for placed in program.layout.modules]
    if not model.modules[module].is_encoder or not len(chunks) or groups[module] != groups[model.llm_index]:
        return chunks.microbatch
    # Replica and LLM microbatch of every sample, as one number.
    most = 1 + int(llm.microbatch.max(initial=0))
    fed = np.full(len(shapes), -1)
    fed[llm.members] = (llm.replica * most + llm.microbatch).repeat(np.diff(llm.offsets))
    # Chunks are sorted by replica and microbatch; those of one microbatch differ in their part.
    begins = np.diff(chunks.replica, prepend=-1).astype(bool) | np.diff(chunks.microbatch, prepend=-1).astype(bool)
    batch = np.cumsum(begins) - 1
    goal = fed[model.modules[module].owners(shapes, chunks.members)]
    parent = goal[chunks.offsets[:-1][begins]]
    of_unit = batch.repeat(np.diff(chunks.offsets))
    if np.array_equal(goal, parent[of_unit]) and np.array_equal(parent // most, chunks.replica[begins]):
        return np.asarray(parent[batch] % most)
    return chunks.microbatch
