"""Communication times: latency-bandwidth formulas of ring collectives and point-to-point transfers."""

import numpy as np
from numpy.typing import ArrayLike

from entrain_bench.base.arrays import FloatArray
from entrain_bench.specs.cluster import LinkTier


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


def send_s(num_bytes: ArrayLike, num_links: int, tier: LinkTier) -> FloatArray:
    """Point-to-point transfer spread over ``num_links`` pairs of ranks that send at the same time."""
    return tier.latency_s + np.asarray(num_bytes, np.float64) / (num_links * tier.bandwidth_bytes_per_s)
