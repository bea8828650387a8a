"""LPT, a simple baseline: whole samples dealt to replicas by their estimated total time, longest first.

The time of a sample is that of its items and its LLM sequence, forward and backward. LPT covers the whole iteration.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np

from entrain_bench.balancing.interleaved import find_turns
from entrain_bench.balancing.lpt import lpt_with_exchange
from entrain_bench.balancing.planning import recompute_factor
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.rank_groups import room_bytes, sample_costs
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.base.hosttime import each_replica_alone
from entrain_bench.program.assignment import Assignment, same_microbatches
from entrain_bench.program.layout import Layout
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.shapes import SampleShapes

# Microbatches may need this multiple of the memory for activations; recomputation compensates.
CROWDED = 2.0
HIDING = 16  # microbatches beyond which the last one hides hardly any of the step
AGAIN = recompute_factor(recompute=True) - 1.0  # time of recomputing everything, relative to both passes


def may_recompute(layout: Layout, profile: Profile) -> bool:
    """Whether recomputation is left to the scheduler."""
    return profile.job.request.recompute is None and not any(placed.recompute for placed in layout.modules)


@dataclass(frozen=True, slots=True)
class Line:
    """The pipeline of a replica, of 1F1B or interleaved; one stage is a pipeline of one rank."""

    depth: int  # ranks (blocks) that follow each other
    turns: int  # virtual stages of each

    @classmethod
    def of(cls, layout: Layout, model: ModelSpec) -> Line:
        """The pipeline of a layout."""
        llm = layout.modules[model.llm_index]
        turns = find_turns(model, layout) if not layout.is_one_stage else None
        return cls(layout.num_ranks // (llm.dp * llm.tp * llm.cp), turns.turns if turns else 1)

    def held(self, count: IntArray) -> FloatArray:
        """Return the most microbatches of a stage whose activations a rank holds, out of ``count``."""
        if self.turns == 1:
            return np.minimum(count, self.depth) / count
        ahead = 2 * (self.depth - 1) + (self.turns - 1) * self.depth + 1
        return np.minimum(count * self.turns, ahead) / count


class Load(NamedTuple):
    """The work of each group, all stages together ``[groups]``."""

    seconds: FloatArray
    bytes_: FloatArray  # of the fullest stage
    samples: FloatArray | IntArray
    longest_s: FloatArray  # of its longest sample

    @classmethod
    def of(cls, group: IntArray, seconds: FloatArray, bytes_: FloatArray, count: int) -> Load:
        """Return the load of each group."""
        longest_s = np.zeros(count)
        np.maximum.at(longest_s, group, seconds)
        load_s, load_bytes = (np.bincount(group, values, count) for values in (seconds, bytes_))
        return cls(load_s, load_bytes, np.bincount(group, minlength=count), longest_s)


def count_microbatches(load: Load, microbatch_s: float, layout: Layout, profile: Profile) -> IntArray:
    """Number of microbatches of each group that takes least by estimate ``[groups]``.

    A microbatch has a fixed time; few of them recompute more, hide less of the step, and need longer fill and drain.
    """
    line = Line.of(layout, profile.job.model)
    room = max(room_bytes(layout, profile), 1.0)
    most = np.maximum(load.samples, 1)[:, None]
    if line.depth == 1:
        most = np.minimum(most, np.maximum(np.ceil(decisive(load.bytes_[:, None] / room)), 1.0))
    step = line.depth if line.turns > 1 else 1
    count = np.arange(step, int(most.max()) + step, step)
    held = line.held(count) * load.bytes_[:, None]
    again = np.maximum(1.0 - room / np.maximum(held, 1.0), 0.0)
    fill_s = np.maximum(load.seconds[:, None] / count, load.longest_s[:, None]) + microbatch_s
    rank_s = load.seconds[:, None] * (1.0 + AGAIN * again) + count * microbatch_s
    total_s = (rank_s + (line.depth - 1) / line.turns * fill_s) / line.depth
    if line.depth == 1:
        few = count[:HIDING].tolist()
        step_s = np.array([profile.programs.step_s(replace(layout, num_microbatches=number)) for number in few])
        total_s = total_s + step_s[np.minimum(count, HIDING) - 1]
    crowded = held > room * (CROWDED if may_recompute(layout, profile) else 1.0)
    allowed = (count < most + step) & ~(crowded & (count < most))
    return np.asarray(count[np.where(allowed, decisive(total_s), np.inf).argmin(axis=1)])


def divide(seconds: FloatArray, bytes_: FloatArray, count: int, line: Line) -> IntArray:
    """Return the microbatch of each sample, at most ``count`` with about equal seconds and bytes.

    The longest is the last; in a pipeline, which fills and drains, it is in the middle.
    """
    places = min(count, len(seconds))
    if places <= 1:
        rank: IntArray = np.zeros(len(seconds), np.int64)
    else:
        shares = np.stack([seconds / max(seconds.sum(), 1e-12), bytes_ / max(bytes_.sum(), 1.0)], axis=1)
        microbatch = lpt_with_exchange(decisive(shares), places)
        order = np.argsort(decisive(np.bincount(microbatch, seconds, places)), kind="stable")
        if line.depth > 1:
            order = np.concatenate([order[::2], order[1::2][::-1]])
        rank = np.argsort(order, kind="stable")[microbatch]
    if line.turns > 1:
        # The last takes the last place of a whole group of as many microbatches as ranks.
        rank = np.where(rank == places - 1, count - 1, rank)
    return np.asarray(rank)


@dataclass(frozen=True, slots=True)
class LongestFirst:
    """Samples to replicas of fixed degrees, by LPT and exchanges."""

    handles_generators: ClassVar[bool] = True
    chooses_microbatches: ClassVar[bool] = True

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Return replicas by estimated seconds; a replica's microbatches have about equal seconds and bytes."""
        model = profile.job.model
        dp = layout.modules[model.llm_index].dp
        (seconds,), bytes_, (microbatch_s,) = sample_costs(shapes, layout, profile, spread=False)
        replica = lpt_with_exchange(decisive(np.stack([seconds, seconds], axis=1)), dp)
        line = Line.of(layout, model)
        counts = count_microbatches(Load.of(replica, seconds, bytes_, dp), float(microbatch_s), layout, profile)
        microbatch = np.zeros(len(shapes), np.int64)
        with each_replica_alone(dp):
            for one, count in enumerate(counts.tolist()):
                mine = np.flatnonzero(replica == one)
                microbatch[mine] = divide(seconds[mine], bytes_[mine], count, line)
        return same_microbatches(model, shapes, replica, microbatch, microbatch)
