"""Transfers along a program's dependencies: their links and seconds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from entrain_bench.base.arrays import BoolArray, FloatArray, IntArray, rows_of
from entrain_bench.costs.links import collective_bytes_per_s
from entrain_bench.program import Program
from entrain_bench.specs.cluster import ClusterSpec
from entrain_bench.specs.framework import FrameworkOptions


@dataclass(frozen=True, slots=True)
class Edges:
    """Transfers along dependencies ``[dependencies]``.

    Attributes:
        source, target: blocks that have and need the data, numbered through all modules.
        tier: the links between them.
        travels: whether there is anything to move from one set of ranks to another.
        link_s: how long the links are busy; 0 for what does not travel.
        fixed_s: what passes besides until the data are there: a latency, and a gather where widths differ.
    """

    source: IntArray
    target: IntArray
    tier: IntArray
    travels: BoolArray
    link_s: FloatArray
    fixed_s: FloatArray


def derive_edges(program: Program, cluster: ClusterSpec, framework: FrameworkOptions) -> Edges:
    """The transfers of a program; pairs of ranks send at the same time, as many as the narrower block has.

    Inside a module every rank sends the hidden states that it has: without sequence parallelism those of all tokens of
    its tensor-parallel group, without context parallelism of the encoder those of all its sequences.
    """
    layout = program.layout
    action = program.dep_actions
    target_action = rows_of(program.dep_offsets)
    width, low, high, rank_set = (
        np.concatenate([getattr(each, name) for each in layout.blocks]) for name in ("width", "low", "high", "rank_set")
    )
    latency = np.array([tier.latency_s for tier in cluster.tiers])
    per_byte = np.array([1.0 / tier.bandwidth_bytes_per_s for tier in cluster.tiers])
    a = program.blocks(action)
    b = program.blocks(target_action)
    travels = (program.dep_bytes > 0) & (rank_set[a] != rank_set[b])
    tier = cluster.tier_of(np.minimum(low[a], low[b]), np.maximum(high[a], high[b]))
    inside = program.module[action] == program.module[target_action]
    parts = np.where(inside, token_parts(program, framework)[a], np.minimum(width[a], width[b]))
    link_s = np.where(travels, program.dep_bytes * per_byte[tier] / parts, 0.0)
    fixed_s = latency[tier]
    # Different widths need the destination to gather what arrived in other shards.
    reshard = width[a] != width[b]
    if reshard.any():
        inner = cluster.tier_of(low[b], high[b])
        share = (width[b] - 1) / width[b]
        attained = np.array([1.0 / collective_bytes_per_s(tier) for tier in cluster.tiers])
        start = np.array([tier.collective_start_s for tier in cluster.tiers])
        waited = (width[b] - 1) * latency[inner] + (width[b] > 1) * start[inner]
        gather = waited + program.dep_bytes * share * attained[inner]
        fixed_s = fixed_s + np.where(reshard, gather, 0.0)
    return Edges(a, b, tier, travels, link_s, np.where(travels, fixed_s, 0.0))


def token_parts(program: Program, framework: FrameworkOptions) -> IntArray:
    """Ranks of each block that hold different tokens between products, numbered through all modules ``[blocks]``."""
    found = []
    for module, placed in zip(program.model.modules, program.layout.modules, strict=True):
        parts = [framework.token_parts(module, tp, cp) for tp, cp in placed.degrees]
        found.append(np.repeat(np.array(parts)[placed.degree_of_copy], placed.pp))
    return np.concatenate(found)


def held_s(program: Program, sends: FloatArray, receives: FloatArray) -> FloatArray:
    """How long lanes are held after each action by what it sends and what their next one receives ``[actions]``.

    A lane sends an action's results and receives the next one's data at the same time, in one batch, and goes on when
    both are through (megatron-core 0.19.2, p2p_communication.py: ``send_forward_recv_backward`` and its likes wait for
    the batch). What one action sends, or receives, shares the lane's links (``moved_s``).
    """
    following = np.append(program.lane_actions[1:], -1)
    following[program.lane_offsets[1:] - 1] = -1
    received = np.where(following >= 0, receives[following], 0.0)
    held = sends.copy()
    np.maximum.at(held, program.lane_actions, received)
    return held


def moved_s(program: Program, link_s: FloatArray, fixed_s: FloatArray) -> tuple[FloatArray, FloatArray]:
    """How long each action sends its results, and receives its data, if nothing else does ``[actions]``.

    Links are busy for ``link_s``, 0 for what takes no time of its ends; ``fixed_s`` pass besides ``[dependencies]``.
    """
    held = np.flatnonzero(link_s > 0)
    sends = np.zeros(program.num_actions)
    receives = np.zeros(program.num_actions)
    for action, total in ((program.dep_actions[held], sends), (rows_of(program.dep_offsets)[held], receives)):
        longest = np.zeros(program.num_actions)
        np.maximum.at(longest, action, fixed_s[held])
        total += np.bincount(action, weights=link_s[held], minlength=program.num_actions) + longest
    return sends, receives
