"""Transfers along a program's dependencies: their links and seconds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from entrain_bench.base.arrays import BoolArray, FloatArray, IntArray, rows_of
from entrain_bench.costs.links import all_gather_s, broadcast_s, collective_bytes_per_s
from entrain_bench.program import Pass, Program
from entrain_bench.program.boundary import are_grids, find_ratio
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
        np.concatenate([getattr(blocks, name) for blocks in layout.blocks])
        for name in ("width", "low", "high", "rank_set")
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
    shares = []
    for module, placed in zip(program.model.modules, program.layout.modules, strict=True):
        parts = [framework.token_parts(module, tp, cp) for tp, cp in placed.degrees]
        shares.append(np.repeat(np.array(parts)[placed.degree_of_copy], placed.pp))
    return np.concatenate(shares)


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


def colocated_transforms(program: Program, cluster: ClusterSpec) -> tuple[IntArray, FloatArray]:
    """Dependencies that collectives between two grids on the same ranks serve, and the delay of each (seconds).

    Forward, an LLM replica fed by k encoder replicas all-gathers over groups of k ranks, one of each; k LLM replicas
    fed by one encoder replica slice what they hold. Backward is the inverse: a slice, or an all-gather over the k
    replicas (arXiv:2605.27678, section 1). One collective carries an encoder microbatch of a group. Gradients are on
    the ranks of the LLM's first stage; with more stages they are broadcast to the others before they are sliced.
    """
    source = program.dep_actions
    target = rows_of(program.dep_offsets)
    llm = program.model.llm_index
    consumer = program.layout.modules[llm].as_replicas
    positions = [np.zeros(0, np.int64)]
    delays = [np.zeros(0)]
    for index, placed in enumerate(module_layout.as_replicas for module_layout in program.layout.modules[:llm]):
        if not are_grids(placed, consumer):
            continue
        ratio = find_ratio(placed, consumer)
        ahead = (program.module[source] == index) & (program.module[target] == llm)
        back = (program.module[source] == llm) & (program.module[target] == index)
        dependencies = np.flatnonzero(ahead | back)
        of_encoder = np.where(ahead, source, target)[dependencies]
        of_llm = np.where(ahead, target, source)[dependencies]
        group = program.replica[of_encoder] // ratio.fan_in
        inside = group == program.replica[of_llm] // ratio.fan_out
        dependencies = dependencies[inside]
        of_encoder = of_encoder[inside]
        group = group[inside].astype(np.int64)
        microbatch = program.chunks[index].microbatch[program.chunk[of_encoder]]
        forward = program.kind[target[dependencies]] == Pass.FORWARD
        call = 2 * (group * (1 + microbatch.max(initial=0)) + microbatch) + forward
        total = np.bincount(call, weights=program.dep_bytes[dependencies])[call]
        ranks = placed.ranks.reshape(min(placed.dp, consumer.dp), -1)
        tier_index = cluster.tier_of(ranks.min(axis=1), ranks.max(axis=1))[group]
        seconds = np.zeros(len(dependencies))
        for number in np.unique(tier_index):
            tier = cluster.tiers[number]
            mine = tier_index == number
            forward_s = all_gather_s(total[mine], ratio.fan_in, tier)
            backward_s = all_gather_s(total[mine], ratio.fan_out, tier) + broadcast_s(total[mine], consumer.pp, tier)
            seconds[mine] = np.where(forward[mine], forward_s, backward_s)
        positions.append(dependencies)
        delays.append(seconds)
    return np.concatenate(positions), np.concatenate(delays)
