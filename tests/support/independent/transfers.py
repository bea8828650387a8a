"""What it takes to move a dependency's bytes, who is held meanwhile, and what queues for which links."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from entrain_bench.program import Pass
from support.independent.job import Action, Job


@dataclass
class Transfer:
    """One use of links: ready when all its sources have ended, or the transfer before it.

    Attributes:
        order: who goes first of two that are ready at the same time.
        links: links that it takes, all at once.
        then: the transfer that forwards what it brings.
        feeds: what waits for it, and what passes until the data are there.
    """

    order: tuple[int, ...]
    link_s: float
    links: list[object]
    missing: int
    then: Transfer | None = None
    feeds: list[tuple[Action, float]] = field(default_factory=list)


@dataclass
class Traffic:
    """How data get from action to action.

    Attributes:
        direct: what waits for an action itself, and for how long after its end.
        queued: transfers that carry what an action makes.
        hold_s: how long lanes are held after an action.
    """

    direct: dict[Action, list[tuple[Action, float]]]
    queued: dict[Action, list[Transfer]]
    hold_s: dict[Action, float]


@dataclass(frozen=True)
class _Move:
    target: Action
    source: Action
    link_s: float
    fixed_s: float
    tier: int


def traffic_of(job: Job) -> Traffic:
    """All traffic of a job."""
    traffic = Traffic(defaultdict(list), defaultdict(list), defaultdict(float))
    needs = sorted((target, source, num_bytes) for target, source, num_bytes in job.needs())
    collective = _collectives(job, needs)
    relay: dict[tuple[int, Pass], list[tuple[Action, Action, int]]] = defaultdict(list)
    moves = []
    for target, source, num_bytes in needs:
        here, there = job.ranks(target), job.ranks(source)
        if not num_bytes or sorted(here) == sorted(there):
            traffic.direct[source].append((target, 0.0))
        elif job.program.layout.single_rank_boundary and source.module != target.module:
            of_llm = source if source.module == job.llm else target
            microbatch = job.chunks[job.llm][of_llm.chunk].microbatch
            relay[microbatch, target.kind].append((target, source, num_bytes))
        elif (target, source) in collective:
            traffic.direct[source].append((target, collective[target, source]))
        else:
            latency, bandwidth = job.machine.tier([*here, *there])
            link_s, fixed_s = num_bytes / bandwidth / _parts(job, target, source), latency
            if len(here) != len(there):
                fixed_s += job.machine.gather_s(num_bytes, here)
            moves.append(_Move(target, source, link_s, fixed_s, job.machine.tier_number([*here, *there])))
    _relayed(job, relay, traffic)
    if job.framework["p2p"] == "blocking":
        for move in moves:
            traffic.direct[move.source].append((move.target, move.link_s + move.fixed_s))
        _held(job, moves, traffic)
    else:
        _queued(job, moves, traffic)
        # What computes beside transfers loses a part of their time.
        _held(job, [replace(move, link_s=job.machine.slowing * move.link_s, fixed_s=0.0) for move in moves], traffic)
    return traffic


def _parts(job: Job, target: Action, source: Action) -> int:
    """Pieces that a tensor travels in: one a rank of the narrower side, if its ranks hold different tokens."""
    if target.module == source.module:
        tp, cp = job.degrees(target)
        return job.sequence_parts(target.module, cp) * (tp if job.splits_states(target.module) else 1)
    return min(len(job.ranks(target)), len(job.ranks(source)))


def _held(job: Job, moves: Sequence[_Move], traffic: Traffic) -> None:
    """Both ends stand still while a batch of sends and receives goes on."""
    sent, received = (defaultdict(list) for _ in range(2))
    for move in moves:
        sent[move.source].append(move)
        received[move.target].append(move)

    def batch_s(batch: Sequence[_Move]) -> float:
        return sum(move.link_s for move in batch) + max((move.fixed_s for move in batch), default=0.0)

    for order in job.orders:
        for place, action in enumerate(order):
            after = received[order[place + 1]] if place + 1 < len(order) else []
            traffic.hold_s[action] = max(traffic.hold_s[action], batch_s(sent[action]), batch_s(after))


def _queued(job: Job, moves: Sequence[_Move], traffic: Traffic) -> None:
    """Every lane has a link out and a link in on each tier."""
    for number, move in enumerate(moves):
        links: list[object] = [("out", move.tier, lane) for lane in job.lanes[move.source]]
        links += [("in", move.tier, lane) for lane in job.lanes[move.target]]
        transfer = Transfer((number,), move.link_s, links, 1, None, [(move.target, move.fixed_s)])
        traffic.queued[move.source].append(transfer)


def _relayed(job: Job, relay: dict[tuple[int, Pass], list[tuple[Action, Action, int]]], traffic: Traffic) -> None:
    """One rank gathers an LLM microbatch of all replicas, then scatters it; it has one link in and one out."""
    ranks = [rank for placed in job.placed for rank in placed.ranks.ravel().tolist()]
    latency, bandwidth = job.machine.tier(ranks)
    for number, (_, carried) in enumerate(sorted(relay.items())):
        seconds = latency + sum(num_bytes for _, _, num_bytes in carried) / bandwidth
        out = Transfer((1, number), seconds, ["relay out"], 1, None, [(target, 0.0) for target, _, _ in carried])
        sources = {source for _, source, _ in carried}
        into = Transfer((0, number), seconds, ["relay in"], len(sources), out)
        for source in sources:
            traffic.queued[source].append(into)


def _replicas(job: Job, module: int) -> list[list[int]]:
    """Ranks of every replica, all stages; none where groups have several widths."""
    placed = job.placed[module]
    if not placed.widths:
        return [ranks.ravel().tolist() for ranks in placed.ranks]
    if len(placed.widths) > 1:
        return []
    stages = [sorted(placed.ranks[:, stage].ravel().tolist()) for stage in range(placed.pp)]
    size = placed.widths[0][0] * placed.widths[0][1]
    return [
        [rank for stage in stages for rank in stage[at : at + size]] for at in range(0, len(stages[0]) + 1 - size, size)
    ]


def _collectives(job: Job, needs: Sequence[tuple[Action, Action, int]]) -> dict[tuple[Action, Action], float]:
    """Dependencies between two grids on the same ranks: all-gathers one way, slices the other (arXiv:2605.27678)."""
    found: dict[tuple[Action, Action], float] = {}
    llm, blocks = job.placed[job.llm], [_replicas(job, module) for module in range(job.llm + 1)]
    for module in range(job.llm):
        mine, its = blocks[module], blocks[job.llm]
        groups = min(len(mine), len(its))
        if not groups or job.placed[module].pp > 1 or max(len(mine), len(its)) % groups:
            continue
        fan_in, fan_out = len(mine) // groups, len(its) // groups
        # A rank has one place in a grid: virtual stages make none.
        ours, theirs = (
            [sorted(rank for row in rows[part * each : (part + 1) * each] for rank in row) for part in range(groups)]
            for rows, each in ((mine, fan_in), (its, fan_out))
        )
        if ours != theirs:
            continue
        calls: dict[tuple[int, int, Pass], list[tuple[Action, Action, int]]] = defaultdict(list)
        for target, source, num_bytes in needs:
            if {target.module, source.module} != {module, job.llm}:
                continue
            of_encoder, of_llm = (source, target) if source.module == module else (target, source)
            chunk = job.chunks[module][of_encoder.chunk]
            group = chunk.replica // fan_in
            if group == job.chunks[job.llm][of_llm.chunk].replica // fan_out:
                calls[group, chunk.microbatch, target.kind].append((target, source, num_bytes))
        for (group, _, kind), carried in calls.items():
            backward = kind is Pass.BACKWARD
            total, ranks = sum(num_bytes for _, _, num_bytes in carried), ours[group]
            seconds = job.machine.gather_s(total, ranks, fan_out if backward else fan_in)
            if backward and llm.pp > 1:
                latency, (start, bandwidth) = job.machine.tier(ranks)[0], job.machine.collective(ranks)
                seconds += start + (llm.pp - 1) * latency + total / bandwidth
            found |= {(target, source): seconds for target, source, _ in carried}
    return found
