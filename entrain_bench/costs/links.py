"""Communication times: latency-bandwidth formulas of ring collectives and point-to-point transfers."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.specs.cluster import ClusterSpec, LinkTier


def all_gather_s(num_bytes: ArrayLike, num_ranks: int, tier: LinkTier) -> FloatArray:
    """Ring all-gather of ``num_bytes`` in total over ``num_ranks``; a reduce-scatter takes the same time.

    n - 1 steps, each of 1 / n of the bytes (Thakur et al., IJHPCA 2005, section 4).
    """
    steps = num_ranks - 1
    latency_s = steps * tier.latency_s + (steps > 0) * tier.collective_start_s
    return latency_s + np.asarray(num_bytes, np.float64) * (steps / num_ranks / collective_bytes_per_s(tier))


def collective_bytes_per_s(tier: LinkTier) -> float:
    """Bandwidth that ring collectives attain on links, for each rank and direction."""
    return tier.bandwidth_bytes_per_s * tier.collective_efficiency


def all_reduce_s(num_bytes: ArrayLike, num_ranks: int, tier: LinkTier) -> FloatArray:
    """Ring all-reduce: a reduce-scatter, then an all-gather, in one kernel."""
    return 2.0 * all_gather_s(num_bytes, num_ranks, tier) - (num_ranks > 1) * tier.collective_start_s


def broadcast_s(num_bytes: ArrayLike, num_ranks: int, tier: LinkTier) -> FloatArray:
    """Pipelined ring broadcast: the bytes pass every link once, and each of the n - 1 hops starts a latency later."""
    latency_s = (num_ranks - 1) * tier.latency_s + tier.collective_start_s
    seconds = latency_s + np.asarray(num_bytes, np.float64) / collective_bytes_per_s(tier)
    return seconds if num_ranks > 1 else np.zeros_like(seconds)


def peers_by_tier(groups: IntArray, cluster: ClusterSpec) -> list[list[int]]:
    """Peers of a rank behind the links of each tier, every combination once, of groups of ranks ``[groups, ranks]``."""
    return _count_peers(groups.shape, groups.astype(np.int64).tobytes(), cluster)


def name_of_exchange(groups: IntArray | None, cluster: ClusterSpec) -> tuple[object, ...]:
    """Return all of expert-parallel groups that times depend on, as part of a key; empty without groups."""
    if groups is None:
        return ()
    return groups.shape[1], *map(tuple, peers_by_tier(groups, cluster))


@lru_cache(maxsize=4096)
def _count_peers(shape: tuple[int, ...], content: bytes, cluster: ClusterSpec) -> list[list[int]]:
    groups = np.frombuffer(content, np.int64).reshape(shape)
    peers = np.zeros((*groups.shape, len(cluster.tiers)), np.int64)
    for member in range(groups.shape[1]):
        tier = cluster.tier_of(groups, groups[:, member, None])
        others = np.arange(groups.shape[1]) != member
        for index in range(len(cluster.tiers)):
            peers[..., index] += (tier == index) & others
    found: list[list[int]] = np.unique(peers.reshape(-1, len(cluster.tiers)), axis=0).tolist()
    return found


def all_to_all_s(num_bytes: ArrayLike, peers: Sequence[int], tiers: Sequence[LinkTier]) -> FloatArray:
    """All-to-all of ``num_bytes`` on each rank, an even share for itself and each of its ``peers`` behind each tier.

    Links of all tiers work at the same time, so the slowest decides; messages start one after the other.
    """
    size = np.asarray(num_bytes, np.float64)
    if not sum(peers):
        return np.zeros_like(size)
    start = max(tier.collective_start_s for count, tier in zip(peers, tiers, strict=True) if count)
    latency_s = sum(count * tier.latency_s for count, tier in zip(peers, tiers, strict=True)) + start
    share = 1.0 + sum(peers)
    slowest = max(count / share / collective_bytes_per_s(tier) for count, tier in zip(peers, tiers, strict=True))
    return np.asarray(latency_s + size * slowest)


def send_s(num_bytes: ArrayLike, num_links: int, tier: LinkTier) -> FloatArray:
    """Point-to-point transfer spread over ``num_links`` pairs of ranks that send at the same time."""
    return tier.latency_s + np.asarray(num_bytes, np.float64) / (num_links * tier.bandwidth_bytes_per_s)
