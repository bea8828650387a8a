"""A priced program on cores that several ranks share: each of those that compute gets an equal part of its core.

So does the scheduler of Linux by and by, over turns of a few milliseconds. A rank that waits takes nothing; what
messages cost the core is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from entrain_bench.base.arrays import FloatArray
from entrain_bench.base.errors import DeadlockError
from entrain_bench.costs.truth import Prices
from entrain_bench.program import Program
from entrain_bench.program.layout import Layout
from entrain_bench.program.timeline import Timeline
from entrain_bench.simulate.steps import place_steps
from entrain_bench.train.messages.places import lane_of_rank


def cores_of_lanes(layout: Layout, cores: Sequence[int]) -> list[list[int]]:
    """The core of every rank of each lane; ranks take turns at the given cores."""
    held: list[list[int]] = [[] for _ in range(layout.num_lanes)]
    for rank in range(1 + max(int(placed.ranks.max()) for placed in layout.modules)):
        if (lane := lane_of_rank(layout, rank)) is not None:
            held[lane].append(cores[rank % len(cores)])
    return held


def place_on_cores(program: Program, prices: Prices, cores: Sequence[Sequence[int]], memory: FloatArray) -> Timeline:
    """When every action runs if a core's ranks share it; transfers neither queue nor hold anybody.

    Args:
        program: the program.
        prices: with the seconds that passes and optimizer steps take on a core of their own.
        cores: core of every rank of each lane.
        memory: of a rank during and after each entry of ``program.lane_actions`` ``[2, entries]``.
    """
    start, end = _place_passes(program, prices, cores)
    wait = np.zeros(program.num_actions)
    # All ranks step at the same time, for they wait for the norm of all gradients together.
    busiest = Counter(core for held in cores for core in held).most_common(1)[0][1]
    steps = replace(prices.steps, optimizer_s=prices.steps.optimizer_s * busiest)
    place_steps(program, steps, np.zeros(program.num_actions), start, end, wait)
    peak = np.maximum.reduceat(memory[0], program.lane_offsets[:-1])
    return Timeline(program, start, end, prices.comm_s, wait, peak, memory)


def _place_passes(program: Program, prices: Prices, cores: Sequence[Sequence[int]]) -> tuple[FloatArray, FloatArray]:
    """Start and end of every pass, NaN for steps ``[actions]``."""
    start, end = np.full(program.num_actions, np.nan), np.full(program.num_actions, np.nan)
    offsets, delay_s = program.lane_offsets, _delay_s(prices)
    queues = [
        [a for a in program.lane_actions[offsets[lane] : offsets[lane + 1]] if program.chunk[a] >= 0]
        for lane in range(program.layout.num_lanes)
    ]
    position = [0] * len(queues)
    lanes_of: dict[int, list[int]] = {}
    for lane, queue in enumerate(queues):
        for action in queue:
            lanes_of.setdefault(action, []).append(lane)
    left_s: dict[int, float] = {}
    now = 0.0
    while any(place < len(queue) for place, queue in zip(position, queues, strict=True)):
        upcoming = []
        for action in {queue[place] for place, queue in zip(position, queues, strict=True) if place < len(queue)}:
            if action in left_s or any(queues[lane][position[lane]] != action for lane in lanes_of[action]):
                continue
            rows = slice(program.dep_offsets[action], program.dep_offsets[action + 1])
            # Not a number as long as one of them is not done.
            ready_s = float((end[program.dep_actions[rows]] + delay_s[rows]).max(initial=0.0))
            if ready_s <= now:
                start[action], left_s[action] = now, float(prices.duration_s[action])
            elif np.isfinite(ready_s):
                upcoming.append(ready_s - now)
        load = Counter(core for action in left_s for lane in lanes_of[action] for core in cores[lane])
        shares = {action: max(load[core] for lane in lanes_of[action] for core in cores[lane]) for action in left_s}
        steps_s = [left_s[action] * shares[action] for action in left_s] + upcoming
        if not steps_s:
            raise DeadlockError("program: deadlock")
        step_s = min(steps_s)
        now += step_s
        for action in [*left_s]:
            # Rounding must not leave a rest that never ends.
            done = left_s[action] * shares[action] <= step_s
            left_s[action] -= step_s / shares[action]
            if done:
                del left_s[action]
                end[action] = now
                for lane in lanes_of[action]:
                    position[lane] += 1
    return start, end


def _delay_s(prices: Prices) -> FloatArray:
    """From the end of what a dependency's data come from to their arrival ``[dependencies]``."""
    if prices.transfers is None:
        return prices.delay_s
    sent = prices.transfers.first >= 0
    link_s = prices.transfers.link_s[np.where(sent, prices.transfers.first, 0)] if len(prices.transfers) else 0.0
    return np.asarray(prices.delay_s + np.where(sent, link_s, 0.0))
