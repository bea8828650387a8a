"""DIP's batches: the LLM takes whole microbatches, other modules sub-microbatches just large enough to be efficient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from entrain_bench.balancing.profile import Profile
from entrain_bench.base.arithmetic import matmul
from entrain_bench.base.arrays import IntArray, offsets_from_counts
from entrain_bench.base.errors import IncompatibleError, require
from entrain_bench.program.assignment import Assignment, ModuleAssignment
from entrain_bench.program.layout import Layout
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.shapes import SampleShapes

# Packed tokens at which a module's efficiency counts as its peak.
PEAK_TOKENS = 131_072


@dataclass(frozen=True, slots=True)
class DipAssigner:
    """Samples in arrival order; the items of a microbatch are cut into sub-microbatches (arXiv:2504.14145).

    Encoders and generators each cut the items by a size of their own.

    Attributes:
        efficiency: share of a module's peak throughput that a sub-microbatch must reach.
    """

    handles_generators: ClassVar[bool] = True

    efficiency: float = 0.95

    def __post_init__(self) -> None:
        require(0 < self.efficiency <= 1, "strategy.assigner.efficiency", self.efficiency, "in (0, 1]")

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Labels of every module's units; items of one sample may be in different sub-microbatches.

        Raises:
            IncompatibleError: if modules differ in DP.
        """
        job = profile.job
        dp = layout.modules[0].dp
        if any(placed.dp != dp for placed in layout.modules):
            raise IncompatibleError("strategy.assigner: DIP needs the same DP for all modules")
        # As Megatron's sampler: consecutive samples fill a microbatch, microbatches go round the replicas.
        group = np.arange(len(shapes)) // job.microbatch_size
        labels = []
        for module, placed in zip(job.model.modules, layout.modules, strict=True):
            units = module.units(shapes)
            if not module.per_item:
                labels.append(ModuleAssignment(group % dp, group // dp))
                continue
            most = efficient_items(profile, module, shapes, placed.tp, placed.cp, self.efficiency)
            owner = group[shapes.item_sample[units]]
            labels.append(ModuleAssignment(owner % dp, sub_microbatches(owner % dp, owner // dp, most)))
        return Assignment(tuple(labels))


def efficient_items(
    profile: Profile, module: ModuleSpec, shapes: SampleShapes, tp: int, cp: int, efficiency: float
) -> int:
    """B_i: the fewest items of mean length whose measured throughput reaches the given share of the peak.

    The peak is the best over powers of two up to ``PEAK_TOKENS`` packed tokens.
    """
    lengths = module.lengths(shapes, module.units(shapes))
    if not len(lengths):
        return 1
    length = max(1, round(float(lengths.mean())))
    counts = np.bincount(module.layer_kind, minlength=len(module.kinds))

    def throughput(items: int) -> float:
        times = profile.layers.measure(module, np.full(items, length), tp, cp)
        return items / float(matmul(counts, [t.total_s[0] for t in times]))

    sizes = [2**i for i in range(max(1, (PEAK_TOKENS // length).bit_length()))]
    measured = [throughput(size) for size in sizes]
    wanted = efficiency * max(measured)
    first = next(index for index, value in enumerate(measured) if value >= wanted)
    if first == 0:
        return 1
    # Between the last power of two that falls short and the first that does not.
    return next((n for n in range(sizes[first - 1] + 1, sizes[first]) if throughput(n) >= wanted), sizes[first])


def sub_microbatches(replica: IntArray, microbatch: IntArray, most: int) -> IntArray:
    """Place of each item's sub-microbatch in its replica's order, from replica and LLM microbatch of each ``[items]``.

    N items of a microbatch form ceil(N / most) sub-microbatches of nearly equal size, in order; places are consecutive
    over the replica's microbatches.
    """
    if not len(replica):
        return np.zeros(0, np.int64)
    key = replica.astype(np.int64) * (1 + int(microbatch.max())) + microbatch
    _, first_item, group, size = np.unique(key, return_index=True, return_inverse=True, return_counts=True)
    order = np.argsort(group, kind="stable")
    rank = np.empty(len(key), np.int64)
    rank[order] = np.arange(len(key)) - np.repeat(offsets_from_counts(size)[:-1], size)
    count = -(-size // most)
    before = offsets_from_counts(count)[:-1]
    # Groups are sorted by replica: count from the first group of each.
    owner = replica[first_item]
    before = before - before[np.searchsorted(owner, owner)]
    return np.asarray(before[group] + rank * count[group] // size[group])
