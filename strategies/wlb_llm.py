"""WLB-LLM (arXiv:2503.17924): microbatches of any length with about the same workload, on fixed degrees.

Algorithm 1 without its queues: all samples belong to the iteration, so outliers cannot wait for a later one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from entrain_bench.balancing.lpt import balanced_groups, place_in_group
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.rank_groups import room_bytes, sample_costs
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.compiled import njit
from entrain_bench.program.assignment import Assignment, same_microbatches
from entrain_bench.program.layout import Layout
from entrain_bench.specs.shapes import SampleShapes


@njit()
def packed(order, workload, size, num_packs, room):  # type: ignore[no-untyped-def]
    """Microbatch of each sample, in the given order: the one of least workload, or of least size where that is full.

    A sample that fits neither would wait for the next iteration; here it joins the one of least size ``[samples]``.
    """
    chosen = np.empty(len(order), np.int64)
    load = np.zeros(num_packs)
    held = np.zeros(num_packs)
    for sample in order:
        shortest = int(held.argmin())
        one = shortest
        for other in range(num_packs):
            if load[other] < load[one]:
                one = other
        if held[one] + size[sample] > room:
            one = shortest
        chosen[sample] = one
        load[one] += workload[sample]
        held[one] += size[sample]
    return chosen


@dataclass(frozen=True, slots=True)
class WorkloadPacking:
    """The layout's number of microbatches, packed over the whole global batch by estimated seconds of all modules."""

    handles_generators: ClassVar[bool] = True
    packs: ClassVar[bool] = True

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Replica and microbatch of every sample, equally many microbatches for every replica."""
        model = profile.job.model
        llm = layout.modules[model.llm_index]
        (seconds,), size, _ = sample_costs(shapes, layout, profile, spread=False)
        workload = decisive(seconds)
        order = np.argsort(-workload, kind="stable")
        num_packs = min(llm.dp * layout.num_microbatches, len(shapes))
        # The first stage of 1F1B holds a microbatch for every stage.
        room = room_bytes(layout, profile) / (profile.job.cluster.num_ranks // (llm.dp * llm.ranks_per_block))
        pack = packed(order, workload, decisive(size), num_packs, room)
        replica = balanced_groups(decisive(np.bincount(pack, workload, num_packs)), llm.dp)
        place = place_in_group(replica)
        return same_microbatches(model, shapes, replica[pack], place[pack], place[pack])
