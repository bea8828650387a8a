"""Length grouping as training scripts switch it on: Hugging Face's and LLaVA's samplers, inside one global batch.

``group_by_length`` of transformers (``get_length_grouped_indices``) sorts samples, so that a microbatch holds samples
alike; LLaVA's ``group_by_modality_length`` spreads lengths, so that microbatches are alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from entrain_bench.balancing.lpt import balanced_groups
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.arithmetic import GOLDEN, mix
from entrain_bench.base.arrays import BoolArray, FloatArray, IntArray
from entrain_bench.program.assignment import Assignment, same_microbatches
from entrain_bench.program.layout import Layout
from entrain_bench.specs.parse import OneOf
from entrain_bench.specs.shapes import SampleShapes

# Of transformers: mega-batches of so many batches of a device.
MEGA_BATCHES = 50


@dataclass(frozen=True, slots=True)
class LengthGrouped:
    """Samples in the order of a length-grouped sampler; microbatches go round the replicas as with any sampler.

    Attributes:
        rule: ``length``: as transformers' ``group_by_length``, by LLM tokens, items included; ``modality_length``: as
            LLaVA's, by text tokens.
    """

    handles_generators: ClassVar[bool] = True
    rule: Annotated[str, OneOf(("length", "modality_length"))] = "length"

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Replica and microbatch from the place in the sampler's order."""
        job = profile.job
        dp = layout.modules[profile.job.model.llm_index].dp
        drawn = mix(shapes.sample_ids.astype(np.uint64) * GOLDEN ^ mix(np.array([GOLDEN])))
        order: IntArray = np.argsort(drawn, kind="stable")
        if self.rule == "length":
            length = shapes.llm_tokens.astype(np.float64)
            order = sorted_in_mega_batches(order, length, MEGA_BATCHES * (len(shapes) // dp))
        else:
            length = shapes.text_tokens.astype(np.float64)
            order = even_by_modality(order, length, np.diff(shapes.item_offsets) > 0, job.microbatch_size)
        place = np.empty(len(shapes), np.int64)
        place[order] = np.arange(len(shapes)) // job.microbatch_size
        return same_microbatches(job.model, shapes, place % dp, place // dp, place // dp)


def sorted_in_mega_batches(order: IntArray, length: FloatArray, mega_batch: int) -> IntArray:
    """The order, cut into mega-batches that are each sorted by falling length; the longest sample comes first."""
    result = order.copy()
    starts = range(0, len(order), mega_batch)
    for start in starts:
        part = order[start : start + mega_batch]
        result[start : start + mega_batch] = part[np.argsort(-length[part], kind="stable")]
    # Memory that does not suffice shows at once.
    longest = max(starts, key=lambda start: length[result[start]])
    result[[0, longest]] = result[[longest, 0]]
    return result


def even_by_modality(order: IntArray, length: FloatArray, has_items: BoolArray, size: int) -> IntArray:
    """The order, cut into microbatches of ``size`` samples of one modality each whose sums of lengths are alike.

    Samples with items and those without are dealt out apart, by falling length, each to the microbatch with the least
    so far that has a free place. What fills no microbatch comes last, in the order of arrival.
    """
    full = []
    rest = []
    for wanted in (True, False):
        mine = order[has_items[order] == wanted]
        num_microbatches = len(mine) // size
        kept = mine[: num_microbatches * size]
        rest.append(mine[len(kept) :])
        if len(kept):
            chunk = balanced_groups(length[kept], num_microbatches, fewest_first=False)
            full.append(kept[np.argsort(chunk, kind="stable")])
    return np.concatenate([*full, np.sort(np.concatenate(rest), kind="stable")])
