"""Two simple baselines: whole samples dealt out by their estimated total time, longest first (LPT).

``lpt`` deals them to replicas, ``lpt_widths`` to context-parallel groups as wide as each sample needs. The time
of a sample is that of its items and its LLM sequence, forward and backward. LPT covers the whole iteration.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from entrain_bench.balancing.lpt import aligned_first, longest_first, lpt_with_exchange
from entrain_bench.balancing.planning import recompute_factor
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.rank_groups import room_bytes, sample_costs
from entrain_bench.balancing.rounds import Rounds, check_plane, round_labels
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.base.hosttime import each_replica_alone
from entrain_bench.program.assignment import Assignment, same_microbatches
from entrain_bench.program.layout import Layout
from entrain_bench.specs.shapes import SampleShapes

# Microbatches may need so many times the memory that activations have; recomputation makes up for it.
CROWDED = 2.0
HIDING = 16  # microbatches beyond which the last one hides hardly any of the step
AGAIN = recompute_factor(recompute=True) - 1.0  # time of recomputing everything, relative to both passes
# Limits of a sample's time on its group that are compared, as shares of the evenly divided work.
LIMITS = (1.0, 0.85, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.12)


def may_recompute(layout: Layout, profile: Profile) -> bool:
    """Whether recomputation is left to the scheduler."""
    return profile.job.request.recompute is None and not any(placed.recompute for placed in layout.modules)


def count_microbatches(
    seconds: FloatArray,
    bytes_: FloatArray,
    samples: IntArray,
    share: FloatArray,
    microbatch_s: float,
    layout: Layout,
    profile: Profile,
) -> IntArray:
    """Number of microbatches of each group that takes least by estimate, from all its seconds, bytes and samples.

    A microbatch costs its fixed time; few of them recompute more, many hide less of the step. In a pipeline a group has
    the layout's number times its ``share`` of its ranks' time. All arrays are ``[groups]``.
    """
    if not layout.is_one_stage:
        return np.maximum(np.rint(decisive(layout.num_microbatches * share)), 1.0).astype(np.int64)
    room = max(room_bytes(layout, profile), 1.0)
    most = np.clip(np.ceil(decisive(bytes_ / room)), 1.0, np.maximum(samples, 1))[:, None]
    least = np.ceil(most / CROWDED) if may_recompute(layout, profile) else most
    count = np.arange(1, 1 + int(most.max()))
    numbers = count[:HIDING].tolist()
    step_s = np.array([profile.programs.step_s(replace(layout, num_microbatches=number)) for number in numbers])
    again = np.maximum(1.0 - count * room / np.maximum(bytes_, 1.0)[:, None], 0.0)
    total_s = AGAIN * again * seconds[:, None] + count * microbatch_s + step_s[np.minimum(count, HIDING) - 1]
    allowed = (least <= count) & (count <= most)
    return np.asarray(1 + np.where(allowed, decisive(total_s), np.inf).argmin(axis=1))


def divide(seconds: FloatArray, bytes_: FloatArray, count: int) -> IntArray:
    """Microbatch of each sample, at most ``count`` that are alike in seconds and bytes; the longest is the last."""
    count = min(count, len(seconds))
    if count <= 1:
        return np.zeros(len(seconds), np.int64)
    shares = np.stack([seconds / max(seconds.sum(), 1e-12), bytes_ / max(bytes_.sum(), 1.0)], axis=1)
    microbatch = lpt_with_exchange(decisive(shares), count)
    rising = np.argsort(decisive(np.bincount(microbatch, seconds, count)), kind="stable")
    return np.asarray(np.argsort(rising, kind="stable")[microbatch])


@dataclass(frozen=True, slots=True)
class LongestFirst:
    """Samples to replicas of fixed degrees, by LPT and exchanges."""

    handles_generators: ClassVar[bool] = True
    chooses_microbatches: ClassVar[bool] = True

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Replica by estimated seconds; microbatches of a replica alike in seconds and bytes."""
        model = profile.job.model
        dp = layout.modules[model.llm_index].dp
        (seconds,), bytes_, (microbatch_s,) = sample_costs(shapes, layout, profile, spread=False)
        replica = lpt_with_exchange(decisive(np.stack([seconds, seconds], axis=1)), dp)
        load_s = np.bincount(replica, seconds, dp)
        load_bytes = np.bincount(replica, bytes_, dp)
        samples = np.bincount(replica, minlength=dp)
        counts = count_microbatches(load_s, load_bytes, samples, np.ones(dp), float(microbatch_s), layout, profile)
        microbatch = np.zeros(len(shapes), np.int64)
        with each_replica_alone(dp):
            for one, count in enumerate(counts.tolist()):
                mine = np.flatnonzero(replica == one)
                microbatch[mine] = divide(seconds[mine], bytes_[mine], count)
        return same_microbatches(model, shapes, replica, microbatch, microbatch)


@dataclass(frozen=True, slots=True)
class LongestFirstOnWidths:
    """Samples to the narrowest groups that end in time: wide ones first, longest first, by LPT and exchanges."""

    handles_generators: ClassVar[bool] = True
    chooses_microbatches: ClassVar[bool] = True
    handles_widths: ClassVar[bool] = True

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Group and round of every sample; ``IncompatibleError`` for a layout without groups of several widths."""
        model = profile.job.model
        llm = layout.modules[model.llm_index]
        check_plane(layout, "lpt_widths", "strategy/planner=hybrid_cp")
        widths = np.array([cp for _, cp in llm.degrees])
        seconds, bytes_, microbatch_s = sample_costs(shapes, layout, profile, spread=False)
        room = max(room_bytes(layout, profile), 1.0)
        again = np.maximum(1.0 - room * widths[:, None] / np.maximum(bytes_, 1.0), 0.0)
        seconds = decisive(seconds * (1.0 + AGAIN * again) + (microbatch_s * (widths > 1))[:, None])
        # On the widest group a sample runs in any case.
        seconds[:-1][again[:-1] > (1.0 - 1.0 / CROWDED) * may_recompute(layout, profile)] = np.inf
        level, first = dealt(seconds, widths, llm.dp)
        width = widths[level]
        own_s = seconds[level, np.arange(len(shapes))]
        _, lead, group = np.unique(np.stack([width, first]), axis=1, return_index=True, return_inverse=True)
        group = group.ravel()
        load_s = np.bincount(group, own_s)
        load_bytes = np.bincount(group, bytes_ / width)
        samples = np.bincount(group)
        ranks = [slice(first[sample], first[sample] + width[sample]) for sample in lead]
        busy_s = np.zeros(llm.dp)
        for held, seconds_of_group in zip(ranks, load_s, strict=True):
            busy_s[held] += seconds_of_group
        share = load_s / np.array([busy_s[held].max() for held in ranks])
        counts = count_microbatches(load_s, load_bytes, samples, share, float(microbatch_s[0]), layout, profile)
        number = numbered(group, ranks, own_s, bytes_, counts, llm.dp)
        return round_labels(model, shapes, layout, Rounds(number, first, width), spread=False)


def dealt(seconds: FloatArray, widths: IntArray, num_positions: int) -> tuple[IntArray, IntArray]:
    """Width of each sample, and first position of its group ``[samples]``, of the limit whose last group ends first.

    ``seconds`` are of a sample on each width ``[widths, samples]``, infinite where it does not fit.
    """
    even_s = float((seconds * widths[:, None]).min(axis=0).sum()) / num_positions
    best_s = np.inf
    for limit in LIMITS:
        good = seconds <= decisive(limit * even_s)
        chosen = np.where(good.any(axis=0), good.argmax(axis=0), seconds.argmin(axis=0))
        own_s = seconds[chosen, np.arange(len(chosen))]
        order = np.lexsort((-own_s, -chosen))
        begin, load_s = aligned_first(order[chosen[order] > 0], widths[chosen], own_s, num_positions)
        narrow = np.flatnonzero(chosen == 0)
        costs = [np.stack([values, values], axis=1) for values in (own_s[narrow], load_s)]
        begin[narrow] = longest_first(costs[0], num_positions, costs[1])
        np.add.at(load_s, begin[narrow], own_s[narrow])
        if decisive(load_s.max()) < best_s:
            best_s = decisive(load_s.max())
            best = chosen, begin, narrow, costs
    level, first, narrow, costs = best
    first[narrow] = lpt_with_exchange(costs[0], num_positions, costs[1])
    return level, first


def numbered(
    group: IntArray, ranks: list[slice], seconds: FloatArray, bytes_: FloatArray, counts: IntArray, num_positions: int
) -> IntArray:
    """Round of each sample; groups, whose ``ranks`` nest, are listed narrow to wide.

    Narrow groups come first, or wide ones: the last rank to begin its last microbatch, which hides the reduction of
    gradients, begins it earlier.
    """
    members = [np.flatnonzero(group == index) for index in range(len(ranks))]
    places = [divide(seconds[m], bytes_[m], count) for m, count in zip(members, counts.tolist(), strict=True)]
    whole_s = np.bincount(group, seconds)

    def last_begin_s(order: range) -> float:
        begin_s, end_s = np.zeros((2, num_positions))
        for index in order:
            end_s[ranks[index]] = end_s[ranks[index]].max() + whole_s[index]
            begin_s[ranks[index]] = end_s[ranks[index]] - np.bincount(places[index], seconds[members[index]])[-1]
        return float(decisive(begin_s.max()))

    number = np.zeros(len(group), np.int64)
    taken = np.zeros(num_positions, np.int64)
    for index in min((range(len(ranks)), range(len(ranks))[::-1]), key=last_begin_s):
        number[members[index]] = taken[ranks[index]].max() + places[index]
        taken[ranks[index]] = 1 + number[members[index]].max()
    return number
