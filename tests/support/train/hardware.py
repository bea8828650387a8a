"""What ranks hand to their GPUs in one iteration, and whether GPUs with few hardware queues get through it.

CUDA maps streams to hardware queues (``CUDA_DEVICE_MAX_CONNECTIONS``; which stream to which is not documented), and
what stands at the head of a queue holds up all behind it, of other streams too. Here it does so until it is through,
which is more than CUDA is known to do. A send runs together with its receive, a collective with all its ranks; nothing
is buffered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from entrain_bench.program import Pass, Program
from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.train.messages import transfers as transfers_module
from entrain_bench.train.messages.rank_plan import Channel, RankPlan, Step
from entrain_bench.train.messages.transfers import Transfers

Key = tuple[Channel, int]  # the how manieth message of a channel
type Name = tuple[str, Hashable]  # what an operation takes part in: those of one name, on all ranks, run together
COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation that a host submits."""

    name: Name  # what it takes part in
    stream: Hashable  # whose operations run one after the other
    event: int = -1  # place of an earlier operation of the rank that must be through; -1 for none


@dataclass
class Device:
    """One rank's GPU: all that its host hands over, in the order in which it does; stands in for torch.distributed."""

    rank: int
    operations: list[Operation] = field(default_factory=list)
    counts: Counter[tuple[str, Channel]] = field(default_factory=Counter)
    sizes: dict[tuple[str, Key], int] = field(default_factory=dict)
    _last: dict[Hashable, int] = field(default_factory=dict)

    def submit(self, name: Name, stream: Hashable, event: int = -1) -> int:
        """Hand over an operation; its place."""
        self.operations.append(Operation(name, stream, event))
        self._last[stream] = len(self.operations) - 1
        return self._last[stream]

    def begin(self, name: Name, stream: Hashable) -> Callable[[], None]:
        """Hand over an operation that begins after what is queued to compute; what makes computing wait for it."""
        place = self.submit(name, stream, self._last.get(COMPUTE, -1))

        def wait() -> None:
            self.submit(("wait", (self.rank, len(self.operations))), COMPUTE, place)

        return wait

    def irecv(self, buffer: torch.Tensor, sender: int, group: int) -> Any:
        wait = self._message("receive", (sender, self.rank), buffer, group)
        return SimpleNamespace(wait=wait)

    def isend(self, tensor: torch.Tensor, receiver: int, group: int) -> Any:
        wait = self._message("send", (self.rank, receiver), tensor, group)
        return SimpleNamespace(wait=wait, is_completed=lambda: True)

    def _message(self, kind: str, channel: Channel, tensor: torch.Tensor, group: int) -> Callable[[], None]:
        key = channel, self.counts[kind, channel]
        self.counts[kind, channel] += 1
        self.sizes[kind, key] = tensor.numel()
        return self.begin(("message", key), group)


def enqueue(
    program: Program, plan: RankPlan, groups: Mapping[Channel, int], monkeypatch: pytest.MonkeyPatch, p2p: str
) -> Device:
    """What the runtime hands to the device of a rank in one iteration: actions, messages, collectives of replicas."""
    device = Device(plan.rank)
    monkeypatch.setattr(transfers_module, "dist", device)
    framework, cpu = FrameworkOptions(p2p=p2p), torch.device("cpu")
    transfers = Transfers(plan, groups, torch.float32, cpu, framework)  # type: ignore[arg-type]
    replicas = Replicas(program, device)
    for step in plan.steps:
        for start in step.starts:
            transfers.post_receives(start.place)
            replicas.start(start.module, start.stage, sums=start.sums)
        transfers.post_receives(int(plan.order[step.action]))
        for message in step.receives:
            transfers.receive(message)
        replicas.wait(step)
        device.submit(("run", step.action), COMPUTE)
        if step.closes:
            replicas.start(step.place.module, step.place.stage, sums=True)
        transfers.send(step, lambda message: torch.zeros(message.num_rows, message.width))
    return device


@dataclass
class Replicas:
    """What the replicas of a rank's stages do together, in one group a stage: gather weights, sum gradients."""

    program: Program
    device: Device
    begun: dict[Hashable, Callable[[], None]] = field(default_factory=dict)

    def start(self, module: int, stage: int, *, sums: bool) -> None:
        placed = self.program.layout.modules[module]
        if placed.dp * placed.cp > 1:
            (lane,) = {int(at) % placed.tp for at in np.argwhere(placed.ranks[:, stage] == self.device.rank)[:, 1]}
            stream = module, stage, lane
            self.begun[sums, module, stage] = self.device.begin(("sum" if sums else "gather", stream), stream)

    def wait(self, step: Step) -> None:
        """Have an action wait for what it needs: the first forward for weights, the synchronisation for gradients."""
        wanted = {Pass.FORWARD: (False,), Pass.GRAD_SYNC: (False, True)}.get(step.kind, ())
        for sums in wanted:
            if wait := self.begun.pop((sums, step.place.module, step.place.stage), None):
                wait()


def unfinished(devices: Sequence[Device], *, one_queue: bool = False) -> set[Name]:
    """What never runs, on the devices of all ranks; each stream has a queue of its own, or all share one."""
    sorter = TopologicalSorter[Name]()
    names = set[Name]()
    for device in devices:
        last: dict[tuple[str, Hashable], Name] = {}
        for operation in device.operations:
            slots = (("stream", operation.stream), *([("queue", 0)] if one_queue else []))
            before = {last[slot] for slot in slots if slot in last}
            if operation.event >= 0:
                before.add(device.operations[operation.event].name)
            sorter.add(operation.name, *before)
            names.add(operation.name)
            last |= dict.fromkeys(slots, operation.name)
    with suppress(CycleError):
        sorter.prepare()
    while ready := sorter.get_ready():
        names -= {*ready}
        sorter.done(*ready)
    return names
