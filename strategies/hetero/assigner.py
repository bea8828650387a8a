"""No data balancing: arrival order, cut into contiguous slices where the degrees of data parallelism differ."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from entrain_bench.balancing.lpt import arrival_places
from entrain_bench.balancing.options import check_least
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.arrays import IntArray, offsets_from_counts
from entrain_bench.program.assignment import Assignment, ModuleAssignment
from entrain_bench.program.boundary import find_ratio, is_colocated
from entrain_bench.program.layout import Layout
from entrain_bench.specs.shapes import SampleShapes


@dataclass(frozen=True, slots=True)
class BatchSlices:
    """Samples in arrival order; an LLM replica's items in contiguous slices over the encoder replicas that feed it.

    What is sliced is the batch dimension of the boundary tensor (arXiv:2605.27678, section 1): the items of one LLM
    microbatch, or, where the encoder runs once for the whole window (colocated, LLM PP > 1: three phases), the items
    of all of a replica's microbatches. Slices differ by at most one item.

    Attributes:
        encoder_passes: chunks of an encoder replica's window in the three-phase schedule; the paper runs one.
    """

    encoder_passes: int = 1

    def __post_init__(self) -> None:
        check_least(self, "strategy.assigner", 1, "encoder_passes")

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Replica and microbatch from the position in the batch alone."""
        job = profile.job
        *encoders, llm = layout.modules
        replica, microbatch = arrival_places(len(shapes), job.microbatch_size, llm.dp)
        modules = []
        for module, placed in zip(job.model.encoders, encoders, strict=True):
            ratio = find_ratio(placed, llm)
            owner = shapes.item_sample[module.units(shapes)]
            group = replica[owner] // ratio.fan_out
            if is_colocated(placed, llm) and llm.pp > 1:
                encoder = group * ratio.fan_in + slice_rows(group, ratio.fan_in)
                passes = slice_rows(encoder, self.encoder_passes)
            else:
                passes = microbatch[owner]
                row = group * (1 + int(microbatch.max(initial=0))) + passes
                encoder = group * ratio.fan_in + slice_rows(row, ratio.fan_in)
            modules.append(ModuleAssignment(encoder, passes))
        return Assignment((*modules, ModuleAssignment(replica, microbatch)))


def slice_rows(row: IntArray, num_slices: int) -> IntArray:
    """Slice of each unit when the units of each row, in their order, are cut into contiguous slices ``[units]``.

    Every row has ``num_slices``, which differ by at most one unit. Rows are not negative.
    """
    counts = np.bincount(row)
    order = np.argsort(row, kind="stable")
    position = np.empty(len(row), np.int64)
    position[order] = np.arange(len(row)) - offsets_from_counts(counts)[row[order]]
    return np.asarray(position * num_slices // counts[row])
