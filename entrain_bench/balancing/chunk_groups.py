"""Groups of dependent passes in a program: replicas, and in each the microbatches with their passes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from entrain_bench.base.arrays import IntArray, offsets_from_counts, rows_of
from entrain_bench.base.compiled import njit
from entrain_bench.program import Program
from entrain_bench.program.assignment import Assignment


def split_by_label(label: IntArray, num_labels: int) -> list[IntArray]:
    """Return the indices with each label, in rising order, one array per label."""
    bounds = np.cumsum(np.bincount(label, minlength=num_labels))[:-1]
    return np.split(np.argsort(label, kind="stable"), bounds)


@njit()
def components(count, one, other):  # type: ignore[no-untyped-def]
    """Return the connected component of each of ``count`` things, numbered by their least thing ``[count]``."""
    # Each thing points to a lesser one of its component, but for the least.
    lesser = np.arange(count)
    for first, second in zip(one, other):  # noqa: B905 (numba knows no strict)
        while lesser[first] != first:
            lesser[first] = lesser[lesser[first]]
            first = lesser[first]
        while lesser[second] != second:
            lesser[second] = lesser[lesser[second]]
            second = lesser[second]
        lesser[max(first, second)] = min(first, second)
    label = np.empty(count, np.int64)
    num_components = 0
    for thing in range(count):
        label[thing] = num_components if lesser[thing] == thing else label[lesser[thing]]
        num_components += lesser[thing] == thing
    return label


@dataclass(frozen=True, slots=True)
class ChunkGroups:
    """Groups of a draft's chunks; chunks of all modules are numbered in one sequence.

    A group is a microbatch with its encoders' and generators' chunks.
    """

    chunk: IntArray  # of each forward and backward ``[first_action[-1]]``
    chunk_set: IntArray  # set of lanes that each is on ``[chunks]``
    group: IntArray  # of each; groups go by set, then by first LLM microbatch ``[chunks]``
    # Place of each chunk's forward and backward in its group ``[2, chunks]``. Forwards go by the first LLM microbatch
    # they serve, then along the chain, backwards by the last, then against it.
    rank: IntArray
    first_group: IntArray  # of each set ``[sets + 1]``


def chunk_groups(draft: Program, assignment: Assignment, action_set: IntArray, num_sets: int) -> ChunkGroups:
    """Group a draft's chunks; ``action_set`` is the set of each forward and backward ``[first_action[-1]]``."""
    count = int(draft.first_action[-1])
    first_chunk = offsets_from_counts(np.array([len(chunks) for chunks in draft.chunks]))
    chunk = draft.chunk[:count].astype(np.int64) + first_chunk[draft.module[:count]]
    chunk_set = np.zeros(first_chunk[-1], np.int64)
    chunk_set[chunk] = action_set
    # First and last LLM microbatch whose samples a chunk holds.
    label = np.asarray(assignment.modules[draft.model.llm_index].microbatch)
    first_llm, last_llm = np.zeros((2, len(chunk_set)), np.int64)
    for module, rows, start in zip(draft.model.modules, draft.chunks, first_chunk, strict=False):
        if len(rows):
            microbatches = label[module.owners(draft.shapes, rows.members)]
            first_llm[start : start + len(rows)] = np.minimum.reduceat(microbatches, rows.offsets[:-1])
            last_llm[start : start + len(rows)] = np.maximum.reduceat(microbatches, rows.offsets[:-1])
    component = components(len(chunk_set), chunk[rows_of(draft.dep_offsets)], chunk[draft.dep_actions])
    arrival = np.full(int(component.max()) + 1, np.iinfo(np.int64).max)
    group_set = np.zeros(len(arrival), np.int64)
    np.minimum.at(arrival, component, first_llm)
    group_set[component] = chunk_set
    order = np.lexsort((arrival, group_set))
    group = np.argsort(order, kind="stable")[component]
    number = np.arange(len(group))
    first = offsets_from_counts(np.bincount(group))
    rank = np.empty((2, len(group)), np.int64)
    for row, keys in zip(rank, ((number, first_llm, group), (-number, last_llm, group)), strict=True):
        row[np.lexsort(keys)] = number - np.repeat(first[:-1], np.diff(first))
    first_group = offsets_from_counts(np.bincount(group_set, minlength=num_sets))
    return ChunkGroups(chunk, chunk_set, group, rank, first_group)
