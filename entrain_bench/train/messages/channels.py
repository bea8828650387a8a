"""Where ranks stand in a layout, and channels: who sends to whom, in process groups in which none waits for another.

NCCL runs the sends and receives of a rank in one group one after the other, each until its peer takes part. A receive
posted early would hold up everything behind it. So a rank has at most one channel in a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from entrain_bench.base.arrays import rows_of
from entrain_bench.program import Program
from entrain_bench.program.layout import Layout, ModuleLayout

Channel = tuple[int, int]  # sender and receiver


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's part of one module: a stage of a replica or group, at a place in its block (TP innermost)."""

    module: int
    replica: int
    stage: int
    position: int


def weights_of(layout: Layout, rank: int) -> list[Place]:
    """The stages whose weights the rank holds, with its replica of each."""
    return [
        Place(index, replica, stage, position)
        for index, module in enumerate(layout.modules)
        for replica, stage, position in np.argwhere(module.ranks == rank).tolist()
    ]


def places_of(layout: Layout, rank: int) -> list[Place]:
    """The blocks that the rank computes in: of its replicas, or of all groups that it is in."""
    places = [place for place in weights_of(layout, rank) if not layout.modules[place.module].widths]
    for index, module in enumerate(layout.modules):
        places += [Place(index, *where) for where in (_group_places(module, rank) if module.widths else ())]
    return places


def _group_places(module: ModuleLayout, rank: int) -> Iterable[tuple[int, int, int]]:
    for stage, column in np.argwhere(module.plane == rank).tolist():
        first = 0
        for (tp, cp), count in zip(module.widths, module.num_groups.tolist(), strict=True):
            group, position = divmod(column, tp * cp)
            if group < count:
                yield first + group, stage, position
            first += count


def block_of(layout: Layout, module: int, replica: int, stage: int) -> list[int]:
    """The ranks of a stage of a replica or group, TP innermost."""
    placed = layout.modules[module]
    if not placed.widths:
        ranks: list[int] = placed.ranks[replica, stage].tolist()
        return ranks
    degree = int(placed.degree_of_copy[replica])
    tp, cp = placed.widths[degree]
    first = (replica - int(placed.num_groups[:degree].sum())) * tp * cp
    group: list[int] = placed.plane[stage, first : first + tp * cp].tolist()
    return group


def lane_of_rank(layout: Layout, rank: int) -> int | None:
    """The lane the rank acts with; None for a rank the layout does not use."""

    def blocks(one: int) -> list[tuple[int, int, int]]:
        return [(place.module, place.replica, place.stage) for place in places_of(layout, one)]

    held = blocks(rank)
    firsts = layout.lane_first_rank.tolist()
    return next((lane for lane, first in enumerate(firsts) if blocks(first) == held), None)


def sending_ranks(from_ranks: Sequence[int], to_ranks: Sequence[int]) -> list[int]:
    """The sender for each receiving rank, from a block of one module to another's; a block's ranks hold all rows."""
    return [rank if rank in from_ranks else from_ranks[i % len(from_ranks)] for i, rank in enumerate(to_ranks)]


def channels_of(program: Program) -> tuple[Channel, ...]:
    """The channels that a program needs, of all ranks."""
    source = program.dep_actions
    target = rows_of(program.dep_offsets)
    edges = (program.dep_bytes > 0) & (program.chunk[target] >= 0)
    columns = (program.module, program.replica, program.stage)
    ends = [column[actions[edges]] for actions in (source, target) for column in columns]
    channels: set[Channel] = set()
    for *sender, module, replica, stage in np.unique(np.stack(ends, axis=1), axis=0).tolist():
        from_ranks = block_of(program.layout, *sender)
        to_ranks = block_of(program.layout, module, replica, stage)
        senders = from_ranks if sender[0] == module else sending_ranks(from_ranks, to_ranks)
        channels.update(zip(senders, to_ranks, strict=True))
    return tuple(sorted(channel for channel in channels if channel[0] != channel[1]))


class Channels:
    """The open channels; every rank opens the same ones in the same order."""

    def __init__(self, new_group: Callable[[], dist.ProcessGroup], device: torch.device) -> None:
        self._new_group = new_group
        self._device = device
        self._groups: list[tuple[dist.ProcessGroup, set[int]]] = []
        self._open: dict[Channel, dist.ProcessGroup] = {}

    def __getitem__(self, channel: Channel) -> dist.ProcessGroup:
        return self._open[channel]

    def open(self, channels: Iterable[Channel]) -> None:
        """Open those that are not yet; collective over all ranks."""
        missing = sorted(set(channels) - self._open.keys())
        for channel in missing:
            self._open[channel] = self._group_without(channel)
        # The first message of a channel connects its ends and blocks them: all ranks go by the same order.
        for sender, receiver in missing:
            group = self._open[sender, receiver]
            greeting = torch.zeros(1, device=self._device)
            if dist.get_rank() == sender:
                dist.send(greeting, receiver, group=group)
            elif dist.get_rank() == receiver:
                dist.recv(greeting, sender, group=group)

    def _group_without(self, channel: Channel) -> dist.ProcessGroup:
        for group, taken in self._groups:
            if taken.isdisjoint(channel):
                taken.update(channel)
                return group
        group = self._new_group()
        self._groups.append((group, set(channel)))
        return group
