"""Messages between ranks: channels, receives posted in one order of all, sends that overlap with compute or block.

A rank has at most one channel in a group, because NCCL runs a group's messages one after the other. Every rank queues
its communication in ``order_of_actions``; a message comes after the action that sends it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from entrain_bench.base.arrays import IntArray
from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.train.device import to_device
from entrain_bench.train.messages.rank_plan import Channel, Message, RankPlan, Step


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


@dataclass(slots=True)
class Transfers:
    """The mailbox of a rank in one iteration."""

    plan: RankPlan
    channels: Channels
    dtype: torch.dtype
    device: torch.device
    framework: FrameworkOptions = field(default_factory=FrameworkOptions)
    _arrived: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    _pending: dict[tuple[int, int], tuple[dist.Work, Tensor]] = field(default_factory=dict)
    _posted: int = 0
    _sent: list[tuple[dist.Work, Tensor]] = field(default_factory=list)

    def post_receives(self, place: int) -> None:
        """Post the receives of all messages whose senders come before a place in the order of all actions."""
        order = self.plan.order
        arrivals = self.plan.arrivals
        while self._posted < len(arrivals) and order[arrivals[self._posted].source] < place:
            message = arrivals[self._posted]
            buffer = torch.empty(message.num_rows, message.width, dtype=self.dtype, device=self.device)
            work = dist.irecv(buffer, message.sender, group=self.channels[message.sender, self.plan.rank])
            assert work is not None
            self._pending[message.key] = work, buffer
            self._posted += 1

    def receive(self, message: Message) -> Tensor:
        """The message's tensor, once it is there."""
        if message.sender == self.plan.rank:
            return self._arrived.pop(message.key)
        work, buffer = self._pending.pop(message.key)
        work.wait()
        return buffer

    def send(self, step: Step, tensor_of: Callable[[Message], Tensor]) -> None:
        """Start sending all messages of an action; those to this rank itself just stay."""
        self._sent = [(work, tensor) for work, tensor in self._sent if not work.is_completed()]
        cut: dict[int, Tensor] = {}
        for message in step.sends:
            if message.target not in cut:
                cut[message.target] = tensor_of(message).contiguous()
            tensor = cut[message.target]
            if message.receiver == self.plan.rank:
                self._arrived[message.key] = tensor
                continue
            work = dist.isend(tensor, message.receiver, group=self.channels[self.plan.rank, message.receiver])
            assert work is not None
            self._sent.append((work, tensor))
        if self.framework.p2p == "blocking":
            self.finish()

    def finish(self) -> None:
        """Wait until everything has left."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()


def gather_rows(step: Step, received: Mapping[tuple[int, int], Tensor], blank: Callable[[], Tensor]) -> Tensor:
    """All received rows at their places in a tensor of zeros, or the one message that carries all."""
    into = None
    for message in step.receives:
        if message.target_rows is None:
            return received[message.key]
        into = blank() if into is None else into
        into[_on_device(message.target_rows, into.device)] = received[message.key]
    return blank() if into is None else into


def cut_rows(tensor: Tensor, message: Message) -> Tensor:
    """The rows a message carries."""
    return tensor if message.source_rows is None else tensor[_on_device(message.source_rows, tensor.device)]


def _on_device(rows: slice | IntArray, device: torch.device) -> slice | Tensor:
    return rows if isinstance(rows, slice) else to_device(torch.from_numpy(rows), device)
