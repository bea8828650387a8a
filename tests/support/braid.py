"""Braid for a tiny model; actions for its list scheduler, and their times from the definition, in plain Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from entrain_bench.balancing.interface import Strategy
from entrain_bench.balancing.interleaved import Interleaved
from entrain_bench.balancing.listing import BACKWARD, ListedActions, Wish, list_schedule
from entrain_bench.balancing.planning import place_chain
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.rounds import even_layers
from entrain_bench.base.arrays import FloatArray, IntArray, offsets_from_counts
from entrain_bench.program.layout import Layout
from entrain_bench.specs.job import Degrees, LayoutRequest
from entrain_bench.specs.model import ModelSpec
from entrain_bench_strategies.braid import BraidAssigner, BraidPlanner
from support.builders import profile_of, random_samples, tiny_cluster, tiny_job, tiny_model

type Row = tuple[Sequence[int], bool, float]


def actions_of(
    rows: Sequence[Row],
    edges: Sequence[tuple[int, int, float]],
    room: int = 99,
    sizes: Sequence[int] | int = 1,
    sends: Sequence[float] | float = 0.0,
    receives: Sequence[float] | float = 0.0,
    tails: Sequence[float] | float = 0.0,
    of_llm: Sequence[int] | int = 0,
    kept: Sequence[tuple[int, float]] | None = None,
    backward: Sequence[int] | None = None,
) -> ListedActions:
    """Actions of rows (lanes, whether backward, seconds) and edges (source, user, delay), and columns of them."""
    count, num_lanes = len(rows), 1 + max(max(lanes) for lanes, _, _ in rows)
    edges = sorted(edges)
    station = np.arange(num_lanes)
    for lanes, _, _ in rows:
        station[np.isin(station, station[[*lanes]])] = station[[*lanes]].min()
    return ListedActions(
        offsets_from_counts(np.array([len(lanes) for lanes, _, _ in rows])),
        np.concatenate([np.array(lanes, np.int64) for lanes, _, _ in rows]),
        np.array([int(back) for _, back, _ in rows]),
        np.broadcast_to(np.asarray(of_llm, np.int64), count).copy(),
        np.array([seconds for _, _, seconds in rows], np.float64),
        np.broadcast_to(np.asarray(sends, np.float64), count).copy(),
        np.broadcast_to(np.asarray(receives, np.float64), count).copy(),
        np.broadcast_to(np.asarray(sizes, np.int64), count).copy(),
        np.bincount([user for _, user, _ in edges], minlength=count),
        offsets_from_counts(np.bincount(np.array([source for source, _, _ in edges], np.int64), minlength=count)),
        np.array([user for _, user, _ in edges], np.int64),
        np.array([delay for _, _, delay in edges], np.float64),
        station,
        np.full(num_lanes, room),
        np.broadcast_to(np.asarray(tails, np.float64), count).copy(),
        np.arange(count) if backward is None else np.array(backward),
        np.array([size for size, _ in kept or [(0, 0.0)] * count]),
        np.array([seconds for _, seconds in kept or [(0, 0.0)] * count]),
    )


def scheduled(
    actions: ListedActions,
    group: Sequence[int],
    priority: Sequence[float],
    alternate: bool = True,
    held: Sequence[int] | None = None,
) -> tuple[IntArray, float, int]:
    """Place of every action, the end, and the number of forced forwards."""
    groups = np.array(group)
    place = np.full(len(groups), -1)
    is_held = np.zeros(len(groups), np.int64) if held is None else np.array(held)
    wish = Wish(groups, np.array(priority, np.float64), is_held, alternate)
    end_s, forced = list_schedule(actions, wish, place)
    return place, end_s, forced


def timed(actions: ListedActions, order: Sequence[int]) -> float:
    """End of the actions in an order that keeps to their dependencies."""
    num_lanes = len(actions.room_bytes)
    done, last = [0.0] * num_lanes, [-1] * num_lanes
    ready: FloatArray = np.zeros(len(order))
    end = 0.0
    for action in order:
        lanes = lanes_of(actions, action)
        begin = ready[action]
        for lane in lanes:
            sent = actions.send_s[last[lane]] if last[lane] >= 0 else 0.0
            begin = max(begin, done[lane] + max(sent, actions.receive_s[action]))
        for lane in lanes:
            done[lane], last[lane] = begin + actions.duration_s[action], action
        end = max(end, begin + actions.duration_s[action] + actions.tail_s[action])
        for row in range(actions.user_offsets[action], actions.user_offsets[action + 1]):
            user = actions.user_actions[row]
            ready[user] = max(ready[user], begin + actions.duration_s[action] + actions.user_delay_s[row])
    return float(end)


def orders(actions: ListedActions) -> Iterator[list[int]]:
    missing = actions.num_waits.copy()

    def longer(begun: list[int]) -> Iterator[list[int]]:
        if len(begun) == len(missing):
            yield begun
        for action in range(len(missing)):
            if missing[action] == 0 and action not in begun:
                users = actions.user_actions[actions.user_offsets[action] : actions.user_offsets[action + 1]]
                missing[users] -= 1
                yield from longer([*begun, action])
                missing[users] += 1

    yield from longer([])


def most_held(actions: ListedActions, order: Sequence[int]) -> int:
    held, most = np.zeros(len(actions.room_bytes), np.int64), 0
    for action in order:
        size = actions.size_bytes[action]
        held[lanes_of(actions, action)] += -size if actions.is_backward[action] == BACKWARD else size
        most = max(most, int(held.max()))
    return most


def lanes_of(actions: ListedActions, action: int) -> IntArray:
    return actions.lanes[actions.lane_offsets[action] : actions.lane_offsets[action + 1]]


MODEL = tiny_model(encoder=6, llm=6)
BRAID = Strategy("braid", BraidPlanner(num_trials=4), BraidAssigner(), Interleaved(memory="greedy"))


def profile_for(model: ModelSpec = MODEL, **request: int) -> Profile:
    job = tiny_job(model, tiny_cluster(2, 4), request=LayoutRequest(**request))
    return profile_of(job, random_samples(np.random.default_rng(0), 64))


def chain_of(profile: Profile, pp: int = 4, turns: int = 1) -> Layout:
    """A chain of PP ranks with so many stages each, of TP 1."""
    dp = profile.job.cluster.num_ranks // pp
    layer_s = [np.ones(len(module.layers)) for module in MODEL.modules]
    layers, leading = even_layers(MODEL, layer_s, pp * turns)[0]
    return place_chain(profile.job, Degrees(1, 1, pp, dp), layers, (False, False), leading, turns)
