"""Cost of turning one distributed form of a boundary tensor into another on the same ranks."""

from __future__ import annotations

import numpy as np

from entrain_bench.base.arrays import FloatArray, IntArray, rows_of
from entrain_bench.costs.links import all_gather_s, broadcast_s
from entrain_bench.program import Pass, Program
from entrain_bench.program.boundary import are_grids, find_ratio
from entrain_bench.specs.cluster import ClusterSpec


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
    for index, placed in enumerate(own.as_replicas for own in program.layout.modules[:llm]):
        if not are_grids(placed, consumer):
            continue
        ratio = find_ratio(placed, consumer)
        ahead = (program.module[source] == index) & (program.module[target] == llm)
        back = (program.module[source] == llm) & (program.module[target] == index)
        found = np.flatnonzero(ahead | back)
        of_encoder = np.where(ahead, source, target)[found]
        of_llm = np.where(ahead, target, source)[found]
        group = program.replica[of_encoder] // ratio.fan_in
        inside = group == program.replica[of_llm] // ratio.fan_out
        found = found[inside]
        of_encoder = of_encoder[inside]
        group = group[inside].astype(np.int64)
        microbatch = program.chunks[index].microbatch[program.chunk[of_encoder]]
        forward = program.kind[target[found]] == Pass.FORWARD
        call = 2 * (group * (1 + microbatch.max(initial=0)) + microbatch) + forward
        total = np.bincount(call, weights=program.dep_bytes[found])[call]
        ranks = placed.ranks.reshape(min(placed.dp, consumer.dp), -1)
        tier_index = cluster.tier_of(ranks.min(axis=1), ranks.max(axis=1))[group]
        seconds = np.zeros(len(found))
        for number in np.unique(tier_index):
            tier = cluster.tiers[number]
            mine = tier_index == number
            forward_s = all_gather_s(total[mine], ratio.fan_in, tier)
            backward_s = all_gather_s(total[mine], ratio.fan_out, tier) + broadcast_s(total[mine], consumer.pp, tier)
            seconds[mine] = np.where(forward[mine], forward_s, backward_s)
        positions.append(found)
        delays.append(seconds)
    return np.concatenate(positions), np.concatenate(delays)
