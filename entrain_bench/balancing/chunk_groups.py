"""Groups of dependent passes in a program: replicas, and in each the microbatches with their passes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from entrain_bench.base.arrays import IntArray, offsets_from_counts, rows_of, take_rows
from entrain_bench.base.compiled import njit
from entrain_bench.program import Program
from entrain_bench.program.assignment import Assignment


def reverse_dependencies(draft: Program) -> tuple[IntArray, IntArray, IntArray]:
    """Return the actions that wait for each forward and backward, as CSR, and the dependency of each row."""
    edge = np.argsort(draft.dep_actions, kind="stable")
    counts = np.bincount(draft.dep_actions, minlength=int(draft.first_action[-1]))
    return offsets_from_counts(counts), rows_of(draft.dep_offsets)[edge], edge


def list_lanes(draft: Program) -> tuple[IntArray, IntArray]:
    """Return the lanes of every forward and backward, as CSR."""
    offsets = []
    lanes = []
    for rows, blocks in zip(draft.chunks, draft.layout.blocks, strict=True):
        block = (rows.replica[:, None] * blocks.num_stages + np.arange(blocks.num_stages)).ravel()
        offsets_of_actions, entries = take_rows(blocks.offsets, np.concatenate([block, block]))
        offsets.append(np.diff(offsets_of_actions))
        lanes.append(blocks.lanes[entries])
    return offsets_from_counts(np.concatenate(offsets)), np.concatenate(lanes).astype(np.int64)


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


def find_consumers(draft: Program, assignment: Assignment) -> tuple[IntArray, IntArray]:
    """Return the first and last LLM microbatch whose samples a chunk holds ``[all chunks]``."""
    label = np.asarray(assignment.modules[draft.model.llm_index].microbatch)
    first = []
    last = []
    for module, rows in zip(draft.model.modules, draft.chunks, strict=True):
        if not len(rows):
            continue
        microbatches = label[module.owners(draft.shapes, rows.members)]
        first.append(np.minimum.reduceat(microbatches, rows.offsets[:-1]))
        last.append(np.maximum.reduceat(microbatches, rows.offsets[:-1]))
    return np.concatenate(first), np.concatenate(last)


def number_groups(component: IntArray, first_llm: IntArray, chunk_set: IntArray) -> tuple[IntArray, IntArray]:
    """Return group of every chunk ``[chunks]`` and set of every group ``[groups]``; order: set, first LLM microbatch.

    A component is a microbatch with its encoders' chunks; for every chunk it is known with its first LLM microbatch and
    its set of lanes ``[chunks]``.
    """
    num_groups = int(component.max()) + 1
    arrival = np.full(num_groups, np.iinfo(np.int64).max)
    group_set = np.zeros(num_groups, np.int64)
    np.minimum.at(arrival, component, first_llm)
    group_set[component] = chunk_set
    order = np.lexsort((arrival, group_set))
    group = np.empty(num_groups, np.int64)
    group[order] = np.arange(num_groups)
    return group[component], group_set[order]


def ranks_in_groups(group: IntArray, first_llm: IntArray, last_llm: IntArray) -> IntArray:
    """Return the place of each chunk's forward and backward in its group ``[2, chunks]``.

    Forwards go by the first LLM microbatch they serve, then along the chain, backwards by the last, then against it.
    """
    chunk = np.arange(len(group))
    first = offsets_from_counts(np.bincount(group))
    rank = np.empty((2, len(group)), np.int64)
    for row, keys in zip(rank, ((chunk, first_llm, group), (-chunk, last_llm, group)), strict=True):
        row[np.lexsort(keys)] = chunk - np.repeat(first[:-1], np.diff(first))
    return rank


@dataclass(frozen=True, slots=True)
class ChunkGroups:
    """Groups of a draft's chunks; chunks of all modules are numbered in one sequence.

    Attributes:
        chunk: of each forward and backward ``[first_action[-1]]``.
        chunk_set: set of lanes that each is on ``[chunks]``.
        group: of each; groups go by set, then by first LLM microbatch ``[chunks]``.
        rank: see ``ranks_in_groups`` ``[2, chunks]``.
        first_group: of each set ``[sets + 1]``.
    """

    chunk: IntArray
    chunk_set: IntArray
    group: IntArray
    rank: IntArray
    first_group: IntArray


def chunk_groups(draft: Program, assignment: Assignment, action_set: IntArray, num_sets: int) -> ChunkGroups:
    """Group a draft's chunks; ``action_set`` is the set of each forward and backward ``[first_action[-1]]``."""
    count = int(draft.first_action[-1])
    wait = rows_of(draft.dep_offsets)
    need = draft.dep_actions
    first_chunk = offsets_from_counts(np.array([len(chunks) for chunks in draft.chunks]))
    chunk = draft.chunk[:count].astype(np.int64) + first_chunk[draft.module[:count]]
    chunk_set = np.zeros(first_chunk[-1], np.int64)
    chunk_set[chunk] = action_set
    first_llm, last_llm = find_consumers(draft, assignment)
    group, group_set = number_groups(components(len(chunk_set), chunk[wait], chunk[need]), first_llm, chunk_set)
    first_group = offsets_from_counts(np.bincount(group_set, minlength=num_sets))
    return ChunkGroups(chunk, chunk_set, group, ranks_in_groups(group, first_llm, last_llm), first_group)
