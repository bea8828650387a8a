"""Messages between ranks: sends that overlap with compute, receives posted ahead in the sender's order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from entrain_bench.train.messages.channels import Channels
from entrain_bench.train.messages.rank_plan import Message, RankPlan, Step

# Actions whose receives are posted before the present one runs.
RECEIVE_AHEAD = 4


@dataclass(slots=True)
class Transfers:
    """The mailbox of a rank in one iteration.

    Attributes:
        plan: the rank's actions.
        channels: all that the plan needs, open.
        width_of: elements a row of a message has.
        dtype, device: of all messages.
    """

    plan: RankPlan
    channels: Channels
    width_of: Callable[[Message], int]
    dtype: torch.dtype
    device: torch.device
    _arrived: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    _pending: dict[tuple[int, int], tuple[dist.Work, Tensor]] = field(default_factory=dict)
    _posted: dict[int, int] = field(default_factory=dict)
    _place: dict[tuple[int, int], int] = field(default_factory=dict)
    _sent: list[tuple[dist.Work, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for sender, messages in self.plan.queues.items():
            self._posted[sender] = 0
            self._place.update({message.key: place for place, message in enumerate(messages)})

    def post_receives(self, index: int) -> None:
        """Post the receives of the next actions, and every earlier message of the same senders."""
        for step in self.plan.steps[index : index + 1 + RECEIVE_AHEAD]:
            for message in step.receives:
                if message.sender != self.plan.rank:
                    self._post_up_to(message)

    def _post_up_to(self, message: Message) -> None:
        sender, place = message.sender, self._place[message.key]
        group = self.channels[sender, self.plan.rank]
        for ahead in self.plan.queues[sender][self._posted[sender] : place + 1]:
            buffer = torch.empty((ahead.num_rows, self.width_of(ahead)), dtype=self.dtype, device=self.device)
            work = dist.irecv(buffer, sender, group=group)
            assert work is not None
            self._pending[ahead.key] = work, buffer
        self._posted[sender] = max(self._posted[sender], place + 1)

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

    def finish(self) -> None:
        """Wait until everything has left."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()
