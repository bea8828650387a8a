"""Messages under NCCL's rules, without NCCL.

What a rank does in one group runs one after the other; a send and its receive run together or not at all.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from entrain_bench.errors import IncompatibleError, UserError
from entrain_bench.experiment import prepare
from entrain_bench.program import Program
from entrain_bench.run import compose_cells
from entrain_bench.specs.framework import P2P, Framework
from entrain_bench.train.messages import channels as channels_module
from entrain_bench.train.messages import transfers as transfers_module
from entrain_bench.train.messages.channels import Channel, Channels, channels_of
from entrain_bench.train.messages.rank_plan import RankPlan, plan_rank
from entrain_bench.train.messages.transfers import Transfers
from support.builders import random_samples
from support.train.four_ranks import LAYOUTS, programs
from support.train.runs import AUDIO
from support.wide import each_strategy

Key = tuple[Channel, int]  # the how manieth message of a channel


@dataclass
class Stream:
    """Operations that a device runs in order."""

    operations: list[Any] = field(default_factory=list)
    done: int = 0

    @property
    def head(self) -> Any:
        return self.operations[self.done] if self.done < len(self.operations) else None


@dataclass
class Device:
    """One rank: what its host hands to the stream that computes and to those of its groups, none of which stops it."""

    rank: int
    compute: Stream = field(default_factory=Stream)
    groups: dict[int, Stream] = field(default_factory=lambda: defaultdict(Stream))
    counts: Counter[tuple[str, Channel]] = field(default_factory=Counter)
    sizes: dict[tuple[str, Key], int] = field(default_factory=dict)

    def irecv(self, buffer: torch.Tensor, sender: int, group: int) -> Any:
        key = self._queue("receive", (sender, self.rank), buffer, group)
        return SimpleNamespace(wait=lambda: self.compute.operations.append(("wait", key)))

    def isend(self, tensor: torch.Tensor, receiver: int, group: int) -> Any:
        key = self._queue("send", (self.rank, receiver), tensor, group)
        return SimpleNamespace(wait=lambda: self.compute.operations.append(("wait", key)), is_completed=lambda: True)

    def _queue(self, kind: str, channel: Channel, tensor: torch.Tensor, group: int) -> Key:
        key = channel, self.counts[kind, channel]
        self.counts[kind, channel] += 1
        self.sizes[kind, key] = tensor.numel()
        # A stream of NCCL's first waits for what is queued to compute.
        self.groups[group].operations.append((kind, key, len(self.compute.operations)))
        return key


def enqueue(
    plan: RankPlan, groups: Mapping[Channel, int], monkeypatch: pytest.MonkeyPatch, p2p: str = "overlapped"
) -> Device:
    """What the runtime hands to the device of a rank in one iteration."""
    device = Device(plan.rank)
    monkeypatch.setattr(transfers_module, "dist", device)
    framework, cpu = Framework(p2p=p2p), torch.device("cpu")
    transfers = Transfers(plan, groups, lambda _: 1, torch.float32, cpu, framework)  # type: ignore[arg-type]
    for index, step in enumerate(plan.steps):
        transfers.post_receives(index)
        for message in step.receives:
            transfers.receive(message)
        device.compute.operations.append(("run", step.action))
        transfers.send(step, lambda message: torch.zeros(message.num_rows, 1))
    return device


def unfinished(devices: list[Device]) -> list[Any]:
    """What never runs: an action runs together on all its ranks, a send together with its receive."""
    ranks_of = Counter(argument for d in devices for kind, argument in d.compute.operations if kind == "run")
    arrived: set[Key] = set()
    moved = True
    while moved:
        moved = False
        at_head: dict[Any, list[Stream]] = defaultdict(list)
        for device in devices:
            while device.compute.head and device.compute.head[0] == "wait" and device.compute.head[1] in arrived:
                device.compute.done, moved = device.compute.done + 1, True
            if device.compute.head and device.compute.head[0] == "run":
                at_head["run", device.compute.head[1]].append(device.compute)
            for stream in device.groups.values():
                if stream.head and stream.head[2] <= device.compute.done:
                    at_head["message", stream.head[1]].append(stream)
        for (kind, argument), streams in at_head.items():
            if len(streams) == (2 if kind == "message" else ranks_of[argument]):
                arrived |= {argument} if kind == "message" else set()
                moved = True
                for stream in streams:
                    stream.done += 1
    return [s.head for device in devices for s in (device.compute, *device.groups.values()) if s.head]


def groups_of(channels: tuple[Channel, ...], monkeypatch: pytest.MonkeyPatch) -> dict[Channel, int]:
    """The group of every channel, by number."""
    monkeypatch.setattr(channels_module, "dist", SimpleNamespace(get_rank=lambda: -1))
    numbers = iter(range(len(channels)))
    opened = Channels(lambda: next(numbers), torch.device("cpu"))  # type: ignore[arg-type, return-value]
    opened.open(channels)
    return {channel: opened[channel] for channel in channels}  # type: ignore[misc]


def check(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that all messages of a program on four ranks arrive."""
    plans = [plan_rank(program, rank) for rank in range(4)]
    sent = {(m.sender, m.receiver) for p in plans for s in p.steps for m in s.sends if m.sender != m.receiver}
    assert sent == set(channels_of(program))
    groups = groups_of(channels_of(program), monkeypatch)
    for group in set(groups.values()):
        ends = [rank for channel, own in groups.items() if own == group for rank in channel]
        assert len(ends) == len(set(ends)), "a rank has one channel a group"
    for p2p in P2P:
        devices = [enqueue(plan, groups, monkeypatch, p2p) for plan in plans]
        sizes: dict[Key, set[int]] = defaultdict(set)
        for (_, key), size in (item for device in devices for item in device.sizes.items()):
            sizes[key].add(size)
        assert all(len(both) == 1 for both in sizes.values()), "both ends know the size"
        assert unfinished(devices) == []


@pytest.mark.parametrize("name", LAYOUTS)
def test_random_programs_come_to_their_end(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(4):
        rng = np.random.default_rng(seed)
        check(programs(random_samples(rng, 10, longest=40), LAYOUTS[name], rng, split=bool(seed % 2)), monkeypatch)


def test_sends_that_block_stop_where_receives_are_posted_late(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = 0
    for seed in range(9, 12):
        rng = np.random.default_rng(seed)
        for split in (False, True):
            program = programs(random_samples(rng, 10, longest=40), LAYOUTS["colocated"], rng, split=split)
            plans = [plan_rank(program, rank) for rank in range(4)]
            groups = groups_of(channels_of(program), monkeypatch)
            # No message is due any more before the action that needs it comes near.
            late = [replace(plan, positions=-plan.positions) for plan in plans]
            assert unfinished([enqueue(plan, groups, monkeypatch, "blocking") for plan in plans]) == []
            stopped += unfinished([enqueue(plan, groups, monkeypatch, "blocking") for plan in late]) != []
    assert stopped


def program_of(*overrides: str) -> Program:
    common = ("workload=synthetic", "cluster=tiny", "layout.tp=1", "layout.dp=null", "global_batch=32")
    (cell,) = compose_cells([*common, "microbatch_size=1", *overrides], multirun=True)
    setting = prepare(cell.config)
    layout = setting.strategy.plan(setting.profile)
    shapes = setting.source.batch(0, setting.job.global_batch, cell.config.seed)
    return setting.strategy.program(shapes, layout, setting.profile)


DEGREES = {"pp2": ("layout.pp=2", "layout.dp=2"), "dp1": ("layout.dp=1",), "free": ()}


@pytest.mark.parametrize("strategy", each_strategy())
@pytest.mark.parametrize("degrees", ["pp2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dp1", "free"))])
@pytest.mark.parametrize("model", ["tiny", pytest.param("tiny_av", marks=pytest.mark.slow)])
def test_programs_of_every_strategy_come_to_their_end(
    strategy: str, degrees: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        program = program_of(f"strategy={strategy}", f"model={model}", *DEGREES[degrees], *([AUDIO] * ("av" in model)))
    except (IncompatibleError, UserError) as error:
        pytest.skip(str(error))
    check(program, monkeypatch)


def test_groups_are_shared_by_ranks_that_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    two_pipelines = ((0, 1), (1, 0), (2, 3), (3, 2))
    assert groups_of(two_pipelines, monkeypatch) == {(0, 1): 0, (1, 0): 1, (2, 3): 0, (3, 2): 1}
    one_pipeline = ((0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2))
    assert groups_of(one_pipeline, monkeypatch) == dict(zip(one_pipeline, (0, 1, 2, 3, 0, 1), strict=True))


def test_one_group_for_all_channels_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of("strategy=megatron", "layout.dp=1")
    plans = [plan_rank(program, rank) for rank in range(4)]
    together = dict.fromkeys(channels_of(program), 0)
    assert unfinished([enqueue(plan, together, monkeypatch) for plan in plans])


def test_receives_in_another_order_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of("strategy=megatron", "layout.dp=1")
    plans = [plan_rank(program, rank) for rank in range(4)]
    groups = groups_of(channels_of(program), monkeypatch)
    faulty = next(plan for plan in plans if plan.queues)
    sender, queue = next(iter(faulty.queues.items()))
    plans[faulty.rank] = replace(faulty, queues=faulty.queues | {sender: queue[::-1]})
    with pytest.raises((AssertionError, KeyError)):
        assert unfinished([enqueue(plan, groups, monkeypatch) for plan in plans]) == []
