"""Point-to-point semantics that a program needs: whether it ends if a send waits for its receiver.

A rendezvous send (NCCL, gloo, MPI's synchronous mode) ends only once its receiver has posted the receive. Whether a
program then ends depends on when ranks post receives. ``find_receive_rule`` decides it from the program alone: it
builds the graph of waits under each rule and looks for a cycle.
"""

from __future__ import annotations

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from entrain_bench.base.arrays import BoolArray, IntArray, offsets_from_counts, rows_of, take_rows
from entrain_bench.costs.edges import colocated_transforms, derive_edges
from entrain_bench.program import Program
from entrain_bench.specs.cluster import ClusterSpec
from entrain_bench.specs.framework import FrameworkOptions

# When a rank posts the receives of a pass, each rule with all programs of those before it: after the sends of the
# pass before have ended; in one batch with them, as megatron-core's 1F1B; before earlier passes, as training here.
SEPARATE, BATCHED, AHEAD = RULES = ("separate", "batched", "ahead")


def find_receive_rule(program: Program, cluster: ClusterSpec, framework: FrameworkOptions) -> str:
    """Return the first of ``RULES`` under which a program ends if sends wait for their receivers.

    Transfers are the cost model's from one set of ranks to another, without collectives. ``AHEAD`` runs every program
    whose order agrees with its dependencies.
    """
    travels = derive_edges(program, cluster, framework).travels
    travels[colocated_transforms(program, cluster)[0]] = False
    return next(rule for rule in RULES if rule == AHEAD or not _is_stuck(program, travels, rule))


def _is_stuck(program: Program, travels: BoolArray, rule: str) -> bool:
    """Whether passes wait for each other in a cycle under a rule.

    Nodes are the end of each action, then for each entry of a lane (its place in ``lane_actions``) the moment at which
    the lane is ready to begin it: the sends of the action before it have ended and, in a batch, its data are there.
    """
    count = program.num_actions
    actions = program.lane_actions
    entries = np.arange(len(actions))
    lane = rows_of(program.lane_offsets)
    # The first entry of a lane has none before it, the last has none behind it.
    has_before = np.append(False, lane[1:] == lane[:-1])
    has_next = np.append(has_before[1:], False)
    source = program.dep_actions
    target = rows_of(program.dep_offsets)
    sender, receiver = _pair_entries(program, lane, source[travels], target[travels])
    # A receive ends once its sender has the data: before the pass begins, or in the batch before it.
    waits = [actions, count + entries[has_before], target]
    needs = [count + entries, actions[entries[has_before] - 1], source]
    if rule == BATCHED:
        waits = [*waits, count + receiver]
        needs = [*needs, actions[sender]]
    # A send ends once its receiver has posted: the lane behind it goes on no earlier.
    posted = has_next[sender] & ((rule == SEPARATE) | has_before[receiver])
    sender = sender[posted]
    receiver = receiver[posted]
    waits.append(count + sender + 1)
    needs.append(count + receiver if rule == SEPARATE else actions[receiver - 1])
    row = np.concatenate(waits)
    column = np.concatenate(needs)
    size = count + len(actions)
    graph = coo_array((np.ones(len(row), np.int8), (row, column)), shape=(size, size)).tocsr()
    parts, _ = connected_components(graph, directed=True, connection="strong")
    return bool(parts < size)


def _pair_entries(program: Program, lane: IntArray, source: IntArray, target: IntArray) -> tuple[IntArray, IntArray]:
    """Every pair of lane entries between which transfers go; a lane of the source has the data and receives nothing."""
    order = np.argsort(program.lane_actions, kind="stable")
    offsets = offsets_from_counts(np.bincount(program.lane_actions, minlength=program.num_actions))
    sides, senders = take_rows(offsets, source)
    number = rows_of(sides)
    inner, receivers = take_rows(offsets, target[number])
    pair = rows_of(inner)
    sender = order[senders][pair]
    receiver = order[receivers]
    carried = number[pair]
    lanes = 1 + int(lane.max(initial=0))
    has_data = np.isin(carried * lanes + lane[receiver], carried * lanes + lane[sender])
    return sender[~has_data], receiver[~has_data]
