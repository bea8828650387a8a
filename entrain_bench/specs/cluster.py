"""Clusters: devices and the links between them. ``experiments/cluster/sources.csv`` says where constants come from."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, Self

import numpy as np

from entrain_bench.base.arrays import BoolArray, IntArray, offsets_from_counts
from entrain_bench.base.errors import require
from entrain_bench.specs.parse import Count, OneOf, Rate, Share, at_least, between, check_fields, parse

Extra = Annotated[float, at_least(0, "0 or more (0: no matter how small)")]
# Ranks of a cluster: a layout lists those of every module.
MAX_RANKS = 2**17
# Sets of rings whose links a process remembers.
MAX_RINGS = 4096
SLOWEST = 1e-6
FASTEST = 1e6
Factor = Annotated[float, between(SLOWEST, FASTEST, f"above 0: from {SLOWEST:g} to {FASTEST:g}")]
HEAD_DIM = 128  # head dimension that attention's efficiencies are stated for
# Generations of attention kernels, oldest first; a device runs those up to its own.
UNFUSED, FLASH1, FLASH2, FLASH3 = ATTENTION_KERNELS = ("unfused", "flash1", "flash2", "flash3")
# Datasheet rates of a device, and the fractions of them that work attains.
PEAKS = {
    "peak_bf16_flops": ("gemm_efficiency", "attention_forward_efficiency", "attention_backward_efficiency"),
    "memory_bandwidth_bytes_per_s": ("memory_efficiency",),
}
# Constants of a device that each factor of ``Speed`` multiplies.
OF_DEVICE: Mapping[str, tuple[str, ...]] = {
    "gemm": ("gemm_efficiency",),
    "attention": ("attention_forward_efficiency", "attention_backward_efficiency"),
    "memory": ("memory_efficiency",),
    "launch": ("kernel_launch_s", "host_launch_s"),
    "overlap": ("overlap_cost",),
    "reserve": ("allocator_reserve",),
}


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One accelerator. Efficiencies are attainable shares for large work; at ``*_half_*`` half of them is attained."""

    name: str
    peak_bf16_flops: Rate
    memory_bytes: Count
    memory_bandwidth_bytes_per_s: Rate
    gemm_efficiency: Share
    attention_forward_efficiency: Share
    attention_backward_efficiency: Share
    memory_efficiency: Share
    kernel_launch_s: Rate
    host_bandwidth_bytes_per_s: Rate  # attainable to CPU memory, each way
    sustained_fraction: Share  # of attainable arithmetic, that training keeps under its power limit
    gemm_half_flops: Extra  # of a product on one rank
    attention_half_tokens: Extra  # length of a sequence without a mask
    attention_half_head_dim: Extra  # relative to very wide heads; efficiencies are stated for ``HEAD_DIM``
    gemm_half_width: Extra = 0.0  # harmonic mean of a product's inner and outer dimension on a rank
    elementwise_efficiency: Share = 1.0  # of kernels that compute as they move data, relative to copies
    overlap_cost: Annotated[float, between(0, 1)] = 0.0  # seconds lost per second of concurrent communication
    host_launch_s: Extra = 0.0  # in which the host issues a kernel; a layer takes no less
    attention_kernel: Annotated[str, OneOf(ATTENTION_KERNELS)] = FLASH2  # that its efficiencies are of
    allocator_reserve: Extra = 0.0  # bytes held per byte of tensors, except weights, gradients, optimizer states
    fp8_speedup: Extra = 0.0  # rate of 8-bit products over that of bf16 ones; 0: not known, or none
    peak_dtype: str = "bfloat16"  # torch's name of the type that ``peak_bf16_flops`` is of


@dataclass(frozen=True, slots=True)
class LinkTier:
    """Links inside aligned blocks of ``num_ranks`` ranks; bandwidth is per rank and direction."""

    name: str
    num_ranks: Annotated[int, at_least(0)]  # 0 in a YAML: all of the cluster
    bandwidth_bytes_per_s: Rate
    latency_s: Rate  # per step of a collective and per transfer
    collective_efficiency: Share = 1.0  # of the bandwidth, that large ring collectives attain
    collective_start_s: Extra = 0.0  # until the first byte of a collective moves


@dataclass(frozen=True, slots=True)
class Speed:
    """Factors on a cluster's constants; above 1 the first five make it faster, the others slower or smaller."""

    gemm: Factor = 1.0  # attained rates of matrix products
    attention: Factor = 1.0  # attained rates of attention
    memory: Factor = 1.0  # attained bandwidth of device memory
    node: Factor = 1.0  # bandwidth of all links inside a node
    network: Factor = 1.0  # bandwidth of all links between nodes
    launch: Factor = 1.0  # launch time of a kernel, on the device and on the host
    overlap: Factor = 1.0  # slowdown of computation by concurrent communication, which stays at most 1
    reserve: Factor = 1.0  # device memory that the allocator holds beyond the tensors

    def __post_init__(self) -> None:
        check_fields(self, "speed.")

    def times(self, other: Self) -> Self:
        """Return the product of both sets of factors."""
        return replace(self, **{name: value * getattr(other, name) for name, value in asdict(self).items()})


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Identical nodes; ``tiers`` go from the innermost links to those that join all ranks."""

    name: str
    num_nodes: Count
    gpus_per_node: Count
    device: DeviceSpec
    tiers: tuple[LinkTier, ...]

    @property
    def num_ranks(self) -> int:
        """Number of GPUs."""
        return self.num_nodes * self.gpus_per_node

    def tier_of(self, first_rank: IntArray, last_rank: IntArray) -> IntArray:
        """Return the index of the innermost tier whose aligned blocks contain both ranks (broadcasts)."""
        tier = np.full(np.broadcast(first_rank, last_rank).shape, len(self.tiers) - 1)
        for index in range(len(self.tiers) - 2, -1, -1):
            size = self.tiers[index].num_ranks
            tier = np.where(np.asarray(first_rank) // size == np.asarray(last_rank) // size, index, tier)
        return tier

    def group_tier(self, ranks: IntArray) -> LinkTier:
        """The innermost tier that joins all the given ranks."""
        return self.tiers[int(self.tier_of(np.array(ranks.min()), np.array(ranks.max())))]

    def at(self, speed: Speed) -> Self:
        """The cluster with its constants multiplied; a peak rises where an efficiency would exceed 1."""
        device = self.device
        changed: dict[str, Any] = {}
        for part, names in OF_DEVICE.items():
            changed |= {name: getattr(device, name) * getattr(speed, part) for name in names}
        changed["overlap_cost"] = min(changed["overlap_cost"], 1.0)
        for peak, shares in PEAKS.items():
            highest = max(changed[name] for name in shares)
            if highest > 1:
                changed |= {name: changed[name] / highest for name in shares}
                changed[peak] = getattr(device, peak) * highest
        tiers = []
        for tier in self.tiers:
            factor = speed.node if tier.num_ranks <= self.gpus_per_node else speed.network
            tiers.append(replace(tier, bandwidth_bytes_per_s=tier.bandwidth_bytes_per_s * factor))
        return replace(self, device=replace(device, **changed), tiers=tuple(tiers))

    def ring_tiers(self, rings: IntArray) -> tuple[LinkTier, ...]:
        """Return the slowest link of each ring; a ring leaves a block by all its ranks there ``[rings, ranks]``."""
        return _slowest_links(self, rings.shape, rings.astype(np.int64).tobytes())

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Parse a cluster YAML; ``UserError`` for wrong values. A key ``sources`` may say where constants are from."""
        config = {key: value for key, value in config.items() if key != "sources"}
        if isinstance(config.get("tiers"), list):
            tiers = config["tiers"]
            config["tiers"] = [{"num_ranks": 0, **tier} if isinstance(tier, Mapping) else tier for tier in tiers]
        cluster = parse(cls, config, "cluster")
        ranks = cluster.num_ranks
        most = MAX_RANKS // cluster.gpus_per_node
        allowed = f"at most {most}, {MAX_RANKS} ranks of {cluster.gpus_per_node} a node"
        require(cluster.num_nodes <= most, "cluster.num_nodes", cluster.num_nodes, allowed)
        links = [replace(tier, num_ranks=tier.num_ranks or ranks) for tier in cluster.tiers]
        sizes = [link.num_ranks for link in links]
        ordered = sizes == sorted(sizes) and sizes[-1:] == [ranks]
        require(ordered, "cluster.tiers", sizes, f"ordered from the smallest block to all {ranks} ranks")
        return replace(cluster, tiers=tuple(links))


def _first_of_blocks(rings: IntArray, size: int) -> BoolArray:
    """Return whether each rank is its ring's first in a block of the given size; ranks ascend ``[rings, ranks]``."""
    first = np.ones(rings.shape, bool)
    first[:, 1:] = np.diff(rings // size, axis=1) > 0
    return first


@lru_cache(MAX_RINGS)
def _slowest_links(cluster: ClusterSpec, shape: tuple[int, ...], content: bytes) -> tuple[LinkTier, ...]:
    rings = np.sort(np.frombuffer(content, np.int64).reshape(shape), axis=1)
    outermost = cluster.tier_of(rings[:, 0], rings[:, -1])
    bandwidth = np.full(len(rings), np.inf)
    first = _first_of_blocks(rings, 1)
    for tier in cluster.tiers:
        members = np.diff(np.flatnonzero(first), append=first.size)
        num_blocks = first.sum(axis=1)
        fewest = np.minimum.reduceat(members, offsets_from_counts(num_blocks)[:-1])
        first = _first_of_blocks(rings, tier.num_ranks)
        crosses = first.sum(axis=1) < num_blocks
        attained = tier.bandwidth_bytes_per_s * tier.collective_efficiency
        bandwidth = np.where(crosses, np.minimum(bandwidth, fewest * attained), bandwidth)
    links = []
    for index, slowest in zip(outermost.tolist(), bandwidth.tolist(), strict=True):
        link = cluster.tiers[index]
        if np.isfinite(slowest):
            link = replace(link, bandwidth_bytes_per_s=slowest, collective_efficiency=1.0)
        links.append(link)
    return tuple(links)
