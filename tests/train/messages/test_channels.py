"""Messages and collectives of replicas on GPUs as NCCL and CUDA run them, without either.

What a rank does in one group runs one after the other; a send and its receive, or a collective on all its ranks, run
together or not at all; streams share hardware queues.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from entrain_bench.base.errors import IncompatibleError, UserError
from entrain_bench.program import Program
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import prepare
from entrain_bench.specs.framework import P2P
from entrain_bench.train.messages import transfers as transfers_module
from entrain_bench.train.messages.rank_plan import (
    Channel,
    RankPlan,
    channels_of,
    order_of_actions,
    plan_rank,
    positions_of_actions,
)
from entrain_bench.train.messages.transfers import Channels
from support.builders import random_samples
from support.train.four_ranks import LAYOUTS, programs
from support.train.hardware import Key, enqueue, unfinished
from support.train.runs import AUDIO, program_of
from support.wide import each_strategy


def groups_of(channels: tuple[Channel, ...], monkeypatch: pytest.MonkeyPatch) -> dict[Channel, int]:
    """The group of every channel, by number."""
    monkeypatch.setattr(transfers_module, "dist", SimpleNamespace(get_rank=lambda: -1))
    numbers = iter(range(len(channels)))
    opened = Channels(lambda: next(numbers), torch.device("cpu"))  # type: ignore[arg-type, return-value]
    opened.open(channels)
    return {channel: opened[channel] for channel in channels}  # type: ignore[misc]


def check(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a program on four ranks comes to its end, in whatever queues.

    With one (CUDA_DEVICE_MAX_CONNECTIONS=1), the worst case, all that a rank is given runs in that order.
    """
    plans = [plan_rank(program, rank) for rank in range(4)]
    sent = {(m.sender, m.receiver) for p in plans for s in p.steps for m in s.sends if m.sender != m.receiver}
    assert sent == set(channels_of(program))
    groups = groups_of(channels_of(program), monkeypatch)
    for p2p in P2P:
        devices = [enqueue(program, plan, groups, monkeypatch, p2p) for plan in plans]
        sizes: dict[Key, set[int]] = defaultdict(set)
        for (_, key), size in (item for device in devices for item in device.sizes.items()):
            sizes[key].add(size)
        assert all(len(both) == 1 for both in sizes.values()), "both ends know the size"
        assert not unfinished(devices)
        assert not unfinished(devices, one_queue=True)


@pytest.mark.wide
@pytest.mark.parametrize("name", LAYOUTS)
def test_random_programs_come_to_their_end(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(4):
        rng = np.random.default_rng(seed)
        check(programs(random_samples(rng, 10, longest=40), LAYOUTS[name], rng, split=bool(seed % 2)), monkeypatch)


def small_program() -> Program:
    rng = np.random.default_rng(1)
    return programs(random_samples(rng, 6, longest=40), LAYOUTS["chain"], rng, split=False)


def ahead_by_one(plan: RankPlan) -> RankPlan:
    """A rank that posts the receives of each action, and begins its sums, as soon as the action before is handed over.

    That is as late as one can do and as early as 1F1B does; where senders stand in the order of all does not matter.
    """
    needed = {message.key: index for index, step in enumerate(plan.steps) for message in step.receives}
    order, places = plan.order.copy(), [plan.order[step.action] for step in plan.steps]
    for message in plan.arrivals:
        order[message.source] = min(order[message.source], places[max(needed[message.key] - 1, 0)] - 1)
    return replace(plan, order=order)


def test_receives_that_are_posted_out_of_order_get_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    program = small_program()
    groups = groups_of(channels_of(program), monkeypatch)
    plans = [ahead_by_one(plan_rank(program, rank)) for rank in range(4)]
    devices = [enqueue(program, plan, groups, monkeypatch, "overlapped") for plan in plans]
    assert not unfinished(devices)
    assert unfinished(devices, one_queue=True)


def program_under(*overrides: str) -> Program:
    common = ("workload=synthetic", "cluster=tiny", "layout.tp=1", "layout.dp=null", "global_batch=32")
    (cell,) = compose_cells([*common, "microbatch_size=1", *overrides], multirun=True)
    return program_of(prepare(cell.config))


DEGREES = {"pp2": ("layout.pp=2", "layout.dp=2"), "dp1": ("layout.dp=1",), "free": ()}


@pytest.mark.wide
@pytest.mark.parametrize("strategy", each_strategy())
@pytest.mark.parametrize("degrees", ["pp2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dp1", "free"))])
@pytest.mark.parametrize("model", ["tiny", pytest.param("tiny_av", marks=pytest.mark.slow)])
def test_programs_of_every_strategy_come_to_their_end(
    strategy: str, degrees: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        program = program_under(
            f"strategy={strategy}", f"model={model}", *DEGREES[degrees], *([AUDIO] * ("av" in model))
        )
    except (IncompatibleError, UserError) as error:
        pytest.skip(str(error))
    check(program, monkeypatch)


def test_groups_are_shared_by_ranks_that_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    two_pipelines = ((0, 1), (1, 0), (2, 3), (3, 2))
    assert groups_of(two_pipelines, monkeypatch) == {(0, 1): 0, (1, 0): 1, (2, 3): 0, (3, 2): 1}
    one_pipeline = ((0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2))
    assert groups_of(one_pipeline, monkeypatch) == dict(zip(one_pipeline, (0, 1, 2, 3, 0, 1), strict=True))


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_order_of_actions_keeps_dependencies_and_lanes(name: str) -> None:
    for seed in range(4):
        rng = np.random.default_rng(seed)
        program = programs(random_samples(rng, 10, longest=40), LAYOUTS[name], rng, split=bool(seed % 2))
        order = order_of_actions(program, rng.random(program.num_actions))
        assert sorted(order) == list(range(program.num_actions))
        for action in range(program.num_actions):
            before = program.dep_actions[program.dep_offsets[action] : program.dep_offsets[action + 1]]
            assert (order[before] < order[action]).all()
        for first, end in zip(program.lane_offsets[:-1], program.lane_offsets[1:], strict=True):
            assert (np.diff(order[program.lane_actions[first:end]]) > 0).all()


def test_positions_are_the_longest_chains() -> None:
    """By hand: of every action the longest of all its predecessors' chains, one after the other."""
    program = small_program()
    for work in (np.ones(program.num_actions, np.int64), np.arange(program.num_actions) % 7 + 1):
        position = positions_of_actions(program, work)
        wanted = [0] * program.num_actions
        for action in np.argsort(order_of_actions(program)).tolist():
            before = program.dep_actions[program.dep_offsets[action] : program.dep_offsets[action + 1]].tolist()
            for first, end in zip(program.lane_offsets[:-1], program.lane_offsets[1:], strict=True):
                own = program.lane_actions[first:end].tolist()
                before += own[own.index(action) - 1 : own.index(action)] if action in own else []
            wanted[action] = max((wanted[other] + int(work[other]) for other in before), default=0)
        assert position.tolist() == wanted
