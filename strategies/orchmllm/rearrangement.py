"""Node-wise rearrangement (arXiv:2503.23830): which replica takes which batch, so that little leaves its node.

Balance does not depend on which replica a batch is on. What moves between nodes does: an integer program gives every
replica one batch so that fewest tokens change nodes, and of those choices the one in which fewest change replicas. It
is an assignment problem, whose linear relaxation has integral corners, so it is solved exactly, in integers.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import linear_sum_assignment

from entrain_bench.base.arrays import IntArray


def place_batches(row: IntArray, batch: IntArray, home: IntArray, tokens: IntArray, node: IntArray) -> IntArray:
    """Replica of each unit ``[units]``: batches of every row on replicas, one each.

    Args:
        row: the micro-step of each unit ``[units]``.
        batch: its batch, below the number of replicas ``[units]``.
        home: the replica that it comes from or goes to ``[units]``.
        tokens: what moves if it is elsewhere ``[units]``.
        node: of each replica ``[replicas]``.
    """
    dp = len(node)
    replica = np.zeros(len(batch), np.int64)
    for each in np.unique(row):
        mine = np.flatnonzero(row == each)
        # Tokens of batch b whose home is replica r [batches, replicas].
        volume = np.bincount(batch[mine] * dp + home[mine], weights=tokens[mine], minlength=dp * dp).reshape(dp, dp)
        replica[mine] = _replica_of_batches(volume.astype(np.int64), node)[batch[mine]]
    return replica


def _replica_of_batches(volume: IntArray, node: IntArray) -> IntArray:
    """Replica of each batch ``[batches]``, by tokens of batch b at home on replica r ``[batches, replicas]``."""
    num_nodes = int(node.max()) + 1
    on_node = np.zeros((len(volume), num_nodes), np.int64)
    np.add.at(on_node.T, node, volume.T)
    # Tokens that stay on the node outweigh all that stay on the replica; sums of such integers are exact.
    stays = on_node[:, node] * (int(volume.sum()) + 1) + volume
    _, columns = linear_sum_assignment(stays, maximize=True)
    return np.asarray(columns, np.int64)
