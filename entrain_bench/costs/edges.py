"""Transfers along a program's dependencies: their links and seconds, and the queues for links."""

from dataclasses import dataclass

import numpy as np

from entrain_bench.base.arrays import BoolArray, FloatArray, IntArray, offsets_from_counts, rows_of, take_rows
from entrain_bench.costs.links import all_gather_s, broadcast_s, collective_bytes_per_s, send_s
from entrain_bench.program import Pass, Program
from entrain_bench.program.layout import Layout, are_grids, find_ratio
from entrain_bench.specs.cluster import ClusterSpec, LinkTier
from entrain_bench.specs.framework import FrameworkOptions


@dataclass(frozen=True, slots=True)
class Edges:
    """Transfers along dependencies ``[dependencies]``; blocks are numbered through all modules."""

    source: IntArray  # block that has the data
    target: IntArray  # block that needs them
    tier: IntArray  # the links between them
    travels: BoolArray  # whether there is anything to move from one set of ranks to another
    link_s: FloatArray  # how long the links are busy; 0 without a transfer
    fixed_s: FloatArray  # additional delay until the data arrive: a latency, and a gather where widths differ


def derive_edges(program: Program, cluster: ClusterSpec, framework: FrameworkOptions) -> Edges:
    """The transfers of a program; pairs of ranks send at the same time, as many as the narrower block has."""
    layout = program.layout
    action = program.dep_actions
    target_action = rows_of(program.dep_offsets)
    width, low, high, rank_set = (
        np.concatenate([getattr(blocks, name) for blocks in layout.blocks])
        for name in ("width", "low", "high", "rank_set")
    )
    latency = np.array([tier.latency_s for tier in cluster.tiers])
    per_byte = np.array([1.0 / tier.bandwidth_bytes_per_s for tier in cluster.tiers])
    start = np.array([tier.collective_start_s for tier in cluster.tiers])
    attained = np.array([1.0 / collective_bytes_per_s(tier) for tier in cluster.tiers])
    a = program.blocks(action)
    b = program.blocks(target_action)
    travels = (program.dep_bytes > 0) & (rank_set[a] != rank_set[b])
    tier = cluster.tier_of(np.minimum(low[a], low[b]), np.maximum(high[a], high[b]))
    inside = program.module[action] == program.module[target_action]
    parts = np.where(inside, token_parts(program, framework)[a], np.minimum(width[a], width[b]))
    link_s = np.where(travels, program.dep_bytes * per_byte[tier] / parts, 0.0)
    # If widths differ, the destination must gather the shards that arrived.
    inner = cluster.tier_of(low[b], high[b])
    share = (width[b] - 1) / width[b]
    waited = (width[b] - 1) * latency[inner] + (width[b] > 1) * start[inner]
    gather = waited + program.dep_bytes * share * attained[inner]
    fixed_s = latency[tier] + np.where(width[a] != width[b], gather, 0.0)
    return Edges(a, b, tier, travels, link_s, np.where(travels, fixed_s, 0.0))


def token_parts(program: Program, framework: FrameworkOptions) -> IntArray:
    """Ranks of each block that hold different tokens between products, numbered through all modules ``[blocks]``."""
    shares = []
    for module, placed in zip(program.model.modules, program.layout.modules, strict=True):
        parts = [framework.token_parts(module, tp, cp) for tp, cp in placed.degrees]
        shares.append(np.repeat(np.array(parts)[placed.degree_of_copy], placed.pp))
    return np.concatenate(shares)


def held_s(program: Program, sends: FloatArray, receives: FloatArray) -> FloatArray:
    """Return seconds that lanes are held after actions by their sends and the next action's receives ``[actions]``."""
    following = np.append(program.lane_actions[1:], -1)
    following[program.lane_offsets[1:] - 1] = -1
    received = np.where(following >= 0, receives[following], 0.0)
    held = sends.copy()
    np.maximum.at(held, program.lane_actions, received)
    return held


def moved_s(program: Program, link_s: FloatArray, fixed_s: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the seconds to send each action's results and to receive its data, on idle links ``[actions]``."""
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

    An LLM replica all-gathers over the k encoder replicas that feed it; k LLM replicas slice one encoder's output.
    Backward is the inverse (arXiv:2605.27678, section 1), after a broadcast from the LLM's first stage.
    """
    source = program.dep_actions
    target = rows_of(program.dep_offsets)
    to_forward = program.kind[target] == Pass.FORWARD
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
        of_encoder = np.where(ahead, source, target)
        group = program.replica[of_encoder] // ratio.fan_in
        inside = group == program.replica[np.where(ahead, target, source)] // ratio.fan_out
        dependencies = np.flatnonzero((ahead | back) & inside)
        group = group[dependencies].astype(np.int64)
        microbatch = program.chunks[index].microbatch[program.chunk[of_encoder[dependencies]]]
        forward = to_forward[dependencies]
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


@dataclass(frozen=True, slots=True)
class LinkTransfers:
    """Transfers, each of which occupies all its links at once; a link serves them in the order they become ready."""

    first: IntArray  # transfer that takes up the data of each dependency, -1: none [dependencies]
    last: IntArray  # transfer that delivers them [dependencies]
    follows: IntArray  # transfer that each one forwards, -1: it starts from ranks' results [transfers]
    link_s: FloatArray  # how long each occupies its links [transfers]
    link_offsets: IntArray  # CSR [transfers + 1]
    links: IntArray
    num_links: int

    def __len__(self) -> int:
        return len(self.link_s)


def both(one: LinkTransfers, other: LinkTransfers) -> LinkTransfers:
    """The transfers of two sets, which share neither links nor dependencies."""

    def shifted(numbers: IntArray) -> IntArray:
        return np.where(numbers >= 0, numbers + len(one), -1)

    return LinkTransfers(
        np.maximum(one.first, shifted(other.first)),
        np.maximum(one.last, shifted(other.last)),
        np.concatenate([one.follows, shifted(other.follows)]),
        np.concatenate([one.link_s, other.link_s]),
        np.concatenate([one.link_offsets, one.link_offsets[-1] + other.link_offsets[1:]]),
        np.concatenate([one.links, one.num_links + other.links]),
        one.num_links + other.num_links,
    )


def relay_between_modules(program: Program, travels: BoolArray, tier: LinkTier) -> LinkTransfers:
    """Return transfers through one rank for each LLM microbatch and direction (arXiv:2603.25120, section 4)."""
    source = program.dep_actions
    target = rows_of(program.dep_offsets)
    carried = np.flatnonzero(travels & (program.module[source] != program.module[target]))
    source = source[carried]
    target = target[carried]
    llm = program.model.llm_index
    of_llm = np.where(program.module[source] == llm, source, target)
    microbatch = program.chunks[llm].microbatch[program.chunk[of_llm]]
    labels, number = np.unique(2 * microbatch + program.kind[target], return_inverse=True)
    count = len(labels)
    first = np.full(len(program.dep_actions), -1)
    last = np.full(len(program.dep_actions), -1)
    first[carried] = number
    last[carried] = count + number
    total_bytes = np.bincount(number, weights=program.dep_bytes[carried], minlength=count)
    return LinkTransfers(
        first,
        last,
        np.concatenate([np.full(count, -1), np.arange(count)]),
        np.tile(send_s(total_bytes, 1, tier), 2),
        np.arange(2 * count + 1),
        np.repeat([0, 1], count),
        2,
    )


def transfers_between_blocks(
    layout: Layout, source: IntArray, target: IntArray, tier: IntArray, link_s: FloatArray
) -> LinkTransfers:
    """One transfer for each dependency that travels, on the sending links of a block and the receiving of another."""
    travels = np.flatnonzero(link_s > 0)
    number = np.full(len(link_s), -1)
    number[travels] = np.arange(len(travels))
    lane_offsets = offsets_from_counts(np.concatenate([np.diff(blocks.offsets) for blocks in layout.blocks]))
    lanes = np.concatenate([blocks.lanes for blocks in layout.blocks])
    sides = []
    for direction, block in enumerate((source[travels], target[travels])):
        offsets, entries = take_rows(lane_offsets, block)
        row = rows_of(offsets)
        sides.append((row, (2 * tier[travels][row] + direction) * layout.num_lanes + lanes[entries]))
    row, link = (np.concatenate(part) for part in zip(*sides, strict=True))
    order = np.argsort(row, kind="stable")
    return LinkTransfers(
        number,
        number,
        np.full(len(travels), -1),
        link_s[travels],
        offsets_from_counts(np.bincount(row, minlength=len(travels))),
        link[order],
        2 * (1 + int(tier.max(initial=0))) * layout.num_lanes,
    )
