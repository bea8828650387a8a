"""Microbatches that a rank is given: an assignment's, or as many on every rank in every iteration."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from entrain_bench.base.errors import UserError
from entrain_bench.program.assignment import Assignment, ModuleAssignment
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.shapes import SampleShapes

# How many microbatches ranks have.
FIXED = "fixed"
EQUAL = "equal"
ASSIGNED = "assigned"
COUNTS = (FIXED, EQUAL, ASSIGNED)


# Microbatches of a global batch: of every rank, the positions of each microbatch's samples, in order.
type Dealt = tuple[tuple[tuple[int, ...], ...], ...]


def as_assignment(dealt: Dealt, model: ModelSpec, shapes: SampleShapes) -> Assignment:
    """Return the assignment for ranks that each hold the whole model: every module runs each microbatch's samples."""
    replica, place = np.empty((2, len(shapes)), np.int64)
    for rank, microbatches in enumerate(dealt):
        for index, positions in enumerate(microbatches):
            replica[list(positions)] = rank
            place[list(positions)] = index
    owners = [module.owners(shapes, module.units(shapes)) for module in model.modules]
    return Assignment(tuple(ModuleAssignment(replica[owner], place[owner]) for owner in owners))


def deal(labels: ModuleAssignment, num_ranks: int, counts: str = ASSIGNED, num_microbatches: int = 0) -> Dealt:
    """The microbatches of an assignment, samples in order of arrival.

    Args:
        labels: replica and microbatch of each sample of the global batch.
        num_ranks: data-parallel ranks; a rank is a replica.
        counts: how many microbatches ranks have: ``fixed``: ``num_microbatches``; ``equal``: as many as the rank with
            most; ``assigned``: as they were assigned. Ranks with fewer split those with most samples.
        num_microbatches: of a rank, if fixed.

    Raises:
        UserError: if a rank has no sample, or cannot have that many microbatches.
    """
    order = np.lexsort((labels.microbatch, labels.replica))
    replica = labels.replica[order]
    place = labels.microbatch[order]
    first = np.flatnonzero((np.diff(replica, prepend=-1) != 0) | (np.diff(place, prepend=-1) != 0))
    rows = [tuple(row.tolist()) for row in np.split(order, first[1:])]
    of_rank: list[list[tuple[int, ...]]] = [[] for _ in range(num_ranks)]
    for rank, row in zip(replica[first].tolist(), rows, strict=True):
        of_rank[rank].append(row)
    count = {FIXED: num_microbatches, EQUAL: max(map(len, of_rank)), ASSIGNED: 0}[counts]
    for rank, microbatches in enumerate(of_rank):
        samples = sum(map(len, microbatches))
        if not samples:
            why = f"rank {rank} received no sample of a global batch, but every rank needs one"
            raise UserError(f"strategy.assigner: {why}. Raise global_batch, or use another strategy")
        if count and not len(microbatches) <= count <= samples:
            raise UserError(
                f"counts={counts}: rank {rank} has {samples} samples in {len(microbatches)} microbatches, which cannot "
                f"be split into {count}. Use counts={EQUAL if counts == FIXED else ASSIGNED}"
            )
    return tuple(tuple(split(rows, count)) for rows in of_rank)


def split(microbatches: Sequence[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    """Halves the microbatch with most samples, the first of several, where it stands, until there are ``count``."""
    rows = list(microbatches)
    while len(rows) < count:
        largest = max(range(len(rows)), key=lambda index: (len(rows[index]), -index))
        row = rows[largest]
        middle = -(-len(row) // 2)
        rows[largest : largest + 1] = [row[:middle], row[middle:]]
    return rows
