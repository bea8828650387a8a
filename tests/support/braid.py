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
    edges: Sequence[tuple[int, int]],
    room: int = 99,
    sizes: Sequence[int] | int = 1,
) -> ListedActions:
    """Actions of rows (lanes, whether backward, seconds), edges (source, user) and sizes."""
    count, num_lanes = len(rows), 1 + max(max(lanes) for lanes, _, _ in rows)
    edges = sorted(edges)
    station = np.arange(num_lanes)
    for lanes, _, _ in rows:
        station[np.isin(station, station[[*lanes]])] = station[[*lanes]].min()
    return ListedActions(
        offsets_from_counts(np.array([len(lanes) for lanes, _, _ in rows])),
        np.concatenate([np.array(lanes, np.int64) for lanes, _, _ in rows]),
        np.array([int(back) for _, back, _ in rows]),
        np.array([seconds for _, _, seconds in rows], np.float64),
        np.broadcast_to(np.asarray(sizes, np.int64), count).copy(),
        np.bincount(np.array([user for _, user in edges], np.int64), minlength=count),
        offsets_from_counts(np.bincount(np.array([source for source, _ in edges], np.int64), minlength=count)),
        np.array([user for _, user in edges], np.int64),
        station,
        np.full(num_lanes, room),
    )


def scheduled(actions: ListedActions, group: Sequence[int], priority: Sequence[float]) -> tuple[IntArray, float, int]:
    """Place of every action, the end, and the number of forced forwards."""
    groups = np.array(group)
    place = np.full(len(groups), -1)
    end_s, forced = list_schedule(actions, Wish(groups, np.array(priority, np.float64)), place)
    return place, end_s, forced


def timed(actions: ListedActions, order: Sequence[int]) -> float:
    """End of the actions in an order that keeps to their dependencies."""
    num_lanes = len(actions.room_bytes)
    done: FloatArray = np.zeros(num_lanes)
    ready: FloatArray = np.zeros(len(order))
    for action in order:
        lanes = lanes_of(actions, action)
        done[lanes] = max(float(ready[action]), float(done[lanes].max())) + actions.duration_s[action]
        users = actions.user_actions[actions.user_offsets[action] : actions.user_offsets[action + 1]]
        ready[users] = np.maximum(ready[users], done[lanes[0]])
    return float(done.max())


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
