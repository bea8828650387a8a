"""How long a blocking sender waits for a receiver that has not posted yet, which the simulator leaves out."""

from __future__ import annotations

from collections import defaultdict
from graphlib import TopologicalSorter

import numpy as np
import pytest

from entrain_bench.base.arrays import rows_of
from entrain_bench.config.compose import compose
from entrain_bench.costs.edges import edges_of
from entrain_bench.program import Program
from entrain_bench.run.experiment import Feed, RunContext, prepare
from entrain_bench.train.messages.positions import order_of_actions

# Seconds of the passes with these waits over those without, less 1, for the 3B model on opencqa_ocr: upper ends of what
# docs/training/communication.md states.
LIMITS = {"megatron": 0.001, "disttrain": 0.001, "dip": 0.02, "braid": 0.02, "entrain": 0.04}


@pytest.mark.wide
@pytest.mark.parametrize("name", LIMITS)
def test_blocking_senders_wait_little_longer_than_simulated(name: str) -> None:
    job = ("workload=opencqa_ocr", "model=qwen25vl_llama3_3b", "tuning=own", "iterations=1")
    setting = prepare(compose(f"strategy={name}", *job))
    feed = Feed(setting, setting.plan(), 0)
    program, _ = feed.program(feed.batch(0))
    without, with_waits = (passes_s(setting, program, waits) for waits in (False, True))
    assert 0 <= with_waits / without - 1 <= LIMITS[name]


def passes_s(setting: RunContext, program: Program, waits: bool) -> float:
    """End of the last pass: the longest chain of passes, transfers and, if asked, waits for receives to be posted.

    A rank posts a receive before its first action that is later than the sender's in the order of all actions.
    """
    prices = setting.truth.price(program)
    count, actions, lane = program.num_actions, program.lane_actions.tolist(), rows_of(program.lane_offsets)
    duration, hold = prices.duration_s, prices.hold_s
    source, target = program.dep_actions, rows_of(program.dep_offsets)
    entries: dict[int, list[int]] = defaultdict(list)
    # Start of each action, then the moment at which a lane is free behind each of its entries.
    after: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for entry, action in enumerate(actions):
        entries[action].append(entry)
        after[count + entry].append((action, duration[action] + hold[action]))
        if entry and lane[entry] == lane[entry - 1]:
            after[action].append((count + entry - 1, 0.0))
    for sender, receiver, seconds in zip(source.tolist(), target.tolist(), prices.delay_s.tolist(), strict=True):
        after[receiver].append((sender, duration[sender] + seconds))
    order = order_of_actions(program)
    travels = edges_of(program, setting.truth.cluster, setting.job.framework).travels
    for edge in np.flatnonzero(travels if waits else travels & False).tolist():
        holders, takers = ({int(lane[at]) for at in entries[int(side[edge])]} for side in (source, target))
        for mine in entries[int(source[edge])]:
            # A rank that holds the result receives nothing.
            for theirs in takers - holders:
                first = int(program.lane_offsets[theirs])
                behind = order[program.lane_actions[first : program.lane_offsets[theirs + 1]]] > order[source[edge]]
                if place := int(np.flatnonzero(behind)[0]):
                    after[count + mine].append((count + first + place - 1, prices.delay_s[edge]))
    ends: dict[int, float] = {}
    for node in TopologicalSorter({node: [other for other, _ in each] for node, each in after.items()}).static_order():
        ends[node] = max((ends[other] + seconds for other, seconds in after[node]), default=0.0)
    return max(ends.values())
