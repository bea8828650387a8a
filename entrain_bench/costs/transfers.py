"""Transfers that queue for links: of the rank that everything between modules passes through, or of every rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from entrain_bench.base.arrays import BoolArray, FloatArray, IntArray, offsets_from_counts, rows_of, take_rows
from entrain_bench.costs.links import send_s
from entrain_bench.program import Program
from entrain_bench.program.layout import Layout
from entrain_bench.specs.cluster import LinkTier


@dataclass(frozen=True, slots=True)
class LinkTransfers:
    """Transfers, each of which occupies all its links at once; a link serves them in the order they become ready.

    A transfer becomes ready when the last source of what it carries is done, or the transfer that it follows.

    Attributes:
        first: transfer that takes up the data of each dependency ``[dependencies]``; -1 for those that take none.
        last: transfer that delivers them ``[dependencies]``.
        follows: the transfer that each one forwards; -1 for those that start from ranks' results ``[transfers]``.
        link_s: how long each occupies its links ``[transfers]``.
        link_offsets, links: links of each transfer, CSR.
        num_links: links in all.
    """

    first: IntArray
    last: IntArray
    follows: IntArray
    link_s: FloatArray
    link_offsets: IntArray
    links: IntArray
    num_links: int

    def __len__(self) -> int:
        return len(self.link_s)


def both(one: LinkTransfers, other: LinkTransfers) -> LinkTransfers:
    """The transfers of two sets, which share neither links nor dependencies."""

    def shifted(numbers: IntArray) -> IntArray:
        return np.where(numbers >= 0, numbers + len(one), -1)

    return LinkTransfers(
        np.maximum(one.first, shifted(other.first)),
        np.maximum(one.last, shifted(other.last)),
        np.concatenate([one.follows, shifted(other.follows)]),
        np.concatenate([one.link_s, other.link_s]),
        np.concatenate([one.link_offsets, one.link_offsets[-1] + other.link_offsets[1:]]),
        np.concatenate([one.links, one.num_links + other.links]),
        one.num_links + other.num_links,
    )


def relay_between_modules(program: Program, travels: BoolArray, tier: LinkTier) -> LinkTransfers:
    """Return transfers through one rank, which gathers an LLM microbatch of all replicas, then scatters it.

    DFLOP (arXiv:2603.25120, section 4). One transfer in and one out for each LLM microbatch and direction, numbered by
    microbatch, forward before backward; the rank receives one and sends one at a time.
    ``travels`` marks dependencies along which bytes go from one set of ranks to another ``[dependencies]``.
    """
    source = program.dep_actions
    target = rows_of(program.dep_offsets)
    carried = np.flatnonzero(travels & (program.module[source] != program.module[target]))
    source = source[carried]
    target = target[carried]
    llm = program.model.llm_index
    of_llm = np.where(program.module[source] == llm, source, target)
    microbatch = program.chunks[llm].microbatch[program.chunk[of_llm]]
    labels, number = np.unique(2 * microbatch + program.kind[target], return_inverse=True)
    count = len(labels)
    first = np.full(len(program.dep_actions), -1)
    last = np.full(len(program.dep_actions), -1)
    first[carried] = number
    last[carried] = count + number
    total_bytes = np.bincount(number, weights=program.dep_bytes[carried], minlength=count)
    return LinkTransfers(
        first,
        last,
        np.concatenate([np.full(count, -1), np.arange(count)]),
        np.tile(send_s(total_bytes, 1, tier), 2),
        np.arange(2 * count + 1),
        np.repeat([0, 1], count),
        2,
    )


def transfers_between_blocks(
    layout: Layout, source: IntArray, target: IntArray, tier: IntArray, link_s: FloatArray
) -> LinkTransfers:
    """One transfer for each dependency that travels; it takes the sending links of one block, the receiving of another.

    A rank has links of its own in every tier, one in each direction; ranks of a lane act together.

    Args:
        layout: the layout.
        source: block that each dependency's data are on, numbered through all modules ``[dependencies]``.
        target: block that needs them ``[dependencies]``.
        tier: links that they take ``[dependencies]``.
        link_s: how long they take ``[dependencies]``; 0 for what does not travel.
    """
    travels = np.flatnonzero(link_s > 0)
    number = np.full(len(link_s), -1)
    number[travels] = np.arange(len(travels))
    lane_offsets = offsets_from_counts(np.concatenate([np.diff(blocks.offsets) for blocks in layout.blocks]))
    lanes = np.concatenate([blocks.lanes for blocks in layout.blocks])
    sides = []
    for direction, block in enumerate((source[travels], target[travels])):
        offsets, entries = take_rows(lane_offsets, block)
        row = rows_of(offsets)
        sides.append((row, (2 * tier[travels][row] + direction) * layout.num_lanes + lanes[entries]))
    row, link = (np.concatenate(part) for part in zip(*sides, strict=True))
    order = np.argsort(row, kind="stable")
    return LinkTransfers(
        number,
        number,
        np.full(len(travels), -1),
        link_s[travels],
        offsets_from_counts(np.bincount(row, minlength=len(travels))),
        link[order],
        2 * (1 + int(tier.max(initial=0))) * layout.num_lanes,
    )
