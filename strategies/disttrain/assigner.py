"""DistTrain's data reordering (arXiv:2408.04275, section 5): between DP ranks, then in every pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Annotated, ClassVar

import numpy as np

from entrain_bench.balancing.lpt import balanced_in_steps, place_in_group
from entrain_bench.balancing.planning import recompute_factor
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.schedules import stages_behind
from entrain_bench.base.arithmetic import matmul
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.base.compiled import inlined, njit
from entrain_bench.base.errors import IncompatibleError, require
from entrain_bench.base.hosttime import each_replica_alone
from entrain_bench.program.assignment import Assignment, same_microbatches
from entrain_bench.program.layout import Layout
from entrain_bench.specs.parse import OneOf
from entrain_bench.specs.shapes import SampleShapes


def interval_order(forward_s: FloatArray, backward_s: FloatArray) -> IntArray:
    """Order of a replica's microbatches that fills the first stage's idle intervals under 1F1B ``[microbatches]``.

    The smallest comes first, the p - 1 smallest others last; the first interval takes the p - 1 microbatches whose
    forwards at the first stage sum closest to it, every later one the closest. Seconds are ``[microbatches, stages]``.
    """
    if forward_s.shape[1] == 1:  # no pipeline, no intervals
        return np.arange(len(forward_s))
    return np.asarray(_fill(np.ascontiguousarray(forward_s), np.ascontiguousarray(backward_s)))


@njit()
def _fill(forward_s, backward_s):  # type: ignore[no-untyped-def]
    """``interval_order`` of two stages or more."""
    order, rest = _front_and_rear(forward_s)
    # The first interval has room for p - 1.
    interval_s = forward_s[order[0], 1:].sum() + backward_s[order[0], 1:].sum()
    picked = _closest_sum(forward_s[rest, 0], min(forward_s.shape[1] - 1, len(rest)), interval_s)
    order[1 : 1 + picked.sum()] = rest[picked]
    rest = rest[~picked]
    if len(rest) > 0:
        _fill_later(rest, order, forward_s, backward_s)
    return order


@njit()
def _front_and_rear(forward_s):  # type: ignore[no-untyped-def]
    """The order with its first and its last microbatches, and the others by rising forward at the first stage."""
    count, stages = forward_s.shape
    rising = np.argsort(forward_s.sum(axis=1), kind="mergesort")
    num_rear = min(stages - 1, count - 1)
    order = np.empty(count, np.int64)
    order[0] = rising[0]
    order[count - num_rear :] = rising[1 : 1 + num_rear]
    rest = rising[1 + num_rear :]
    return order, rest[np.argsort(forward_s[rest, 0], kind="mergesort")]


@njit()
def _fill_later(rest, order, forward_s, backward_s):  # type: ignore[no-untyped-def]
    """Put one microbatch after the other into the interval before backward 1, 2, ... of the first stage."""
    stages = forward_s.shape[1]
    forward_end, backward_end = _warm_up(order, forward_s, backward_s)
    first_s = forward_s[rest, 0]
    for step in range(1, len(rest) + 1):
        arrival_s = _arrival(step, order, forward_s, backward_s, forward_end, backward_end)
        chosen = _take_closest(rest, first_s, len(rest) + 1 - step, arrival_s - backward_end[0])
        order[stages - 1 + step] = chosen
        forward_end[0] = backward_end[0] + forward_s[chosen, 0]
        backward_end[0] = max(forward_end[0], arrival_s) + backward_s[order[step], 0]


@njit()
def _warm_up(order, forward_s, backward_s):  # type: ignore[no-untyped-def]
    """Ends of each stage's latest forward and backward up to backward 0, from the order's first p microbatches."""
    stages = forward_s.shape[1]
    forward_end, backward_end, arrived_s = np.zeros((3, stages))  # Arrivals are those of each microbatch at the stage.
    for stage in range(stages):
        now_s = 0.0
        for position in range(stages - stage):
            now_s = max(now_s, arrived_s[position]) + forward_s[order[position], stage]
            arrived_s[position] = now_s
        forward_end[stage] = now_s
    now_s = 0.0
    for stage in range(stages - 1, -1, -1):
        now_s = max(now_s, forward_end[stage]) + backward_s[order[0], stage]
        backward_end[stage] = now_s
    return forward_end, backward_end


@inlined
def _arrival(step, order, forward_s, backward_s, forward_end, backward_end):  # type: ignore[no-untyped-def]
    """Return when a backward's gradient reaches the first stage; each other stage first runs a forward, then it."""
    stages = forward_s.shape[1]
    # Last stage first: each takes the microbatch whose forward the stage before it has done a step ago.
    for stage in range(stages - 1, 0, -1):
        position = step + stages - 1 - stage
        before_s = max(backward_end[stage], forward_end[stage - 1])
        forward_end[stage] = before_s + forward_s[order[position], stage]
    now_s = 0.0
    for stage in range(stages - 1, 0, -1):
        now_s = max(now_s, forward_end[stage]) + backward_s[order[step], stage]
        backward_end[stage] = now_s
    return now_s


@inlined
def _take_closest(rest, first_s, count, interval_s):  # type: ignore[no-untyped-def]
    """Take out of the first ``count`` the microbatch whose forward at the first stage is closest to an interval."""
    best = 0
    for place in range(1, count):
        if abs(first_s[place] - interval_s) < abs(first_s[best] - interval_s):
            best = place
    chosen = rest[best]
    for place in range(best, count - 1):
        rest[place] = rest[place + 1]
        first_s[place] = first_s[place + 1]
    return chosen


@njit()
def _closest_sum(rising, number, target):  # type: ignore[no-untyped-def]
    """Return ``number`` rising values that sum close to the target: the best consecutive ones, then the best swap."""
    picked = np.zeros(len(rising), np.bool_)
    total = rising[:number].sum()
    best_total = total
    first = 0
    for start in range(1, len(rising) - number + 1):
        total += rising[start + number - 1] - rising[start - 1]
        if abs(total - target) < abs(best_total - target):
            best_total = total
            first = start
    picked[first : first + number] = True
    out = -1
    into = -1
    closest = abs(best_total - target)
    for inside in range(first, first + number):
        for outside in range(len(rising)):
            if not picked[outside]:
                miss = abs(best_total - rising[inside] + rising[outside] - target)
                if miss < closest:
                    out = inside
                    into = outside
                    closest = miss
    if out >= 0:
        picked[out] = False
        picked[into] = True
    return picked


@dataclass(frozen=True, slots=True)
class DistTrainAssigner:
    """Spreads encoder work over DP ranks, then orders each pipeline's microbatches; samples of a microbatch stay.

    Attributes:
        intra: samples that DP ranks balance: of the global batch, of one microbatch of all ranks, or none.
        inter: whether the microbatches of a pipeline are reordered.
        carry: with ``intra=microbatch``, whether earlier load counts (not in Megatron-Bridge, pull request 4608).
    """

    handles_generators: ClassVar[bool] = True
    intra: Annotated[str, OneOf(("none", "microbatch", "global_batch"))] = "global_batch"
    inter: bool = True
    carry: bool = False

    def __post_init__(self) -> None:
        alone = not self.carry or self.intra == "microbatch"
        require(alone, "strategy.assigner.carry", self.carry, f"false with intra={self.intra}")

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Replica and microbatch of every sample, from estimated workloads."""
        model = profile.job.model
        dp = layout.modules[model.llm_index].dp
        size = profile.job.microbatch_size
        # Forward seconds of each sample in each module, at the module's own degrees [samples, modules].
        seconds = np.zeros((len(shapes), len(layout.modules)))
        for column, module, placed in zip(seconds.T, model.modules, layout.modules, strict=True):
            units_s = profile.estimates.units(module, shapes, placed.tp, placed.cp, placed.expert_groups)
            column[:] = shapes.sum_items(module.units(shapes), units_s) if module.per_item else units_s
        # Encoders with more replicas than the LLM are balanced by replica; an LLM replica joins `fan` of them if even.
        fan, rest = divmod(layout.modules[0].dp, dp)
        if self.intra == "none" or rest or size % fan:
            fan = 1
        # The varying part: the work of encoders and generators. LLM sequences are packed to one length.
        varying = np.delete(seconds, model.llm_index, axis=1).sum(axis=1)
        group = self.groups(varying, dp * fan, dp * size)
        replica = group // fan
        part = size // fan
        position = place_in_group(group)
        microbatch = position // part
        position = microbatch * size + group % fan * part + position % part
        if self.inter:
            place = reorder(seconds, replica, microbatch, layout, profile)
            position = place * size + position % size
            microbatch = place
        encoder, generator = (
            unit_replicas(replica, microbatch, position, layout, side, model.llm_index)
            for side in (slice(0, model.llm_index), slice(model.llm_index + 1, None))
        )
        return same_microbatches(model, shapes, replica, microbatch, microbatch, encoder, generator)

    def groups(self, work_s: FloatArray, num_groups: int, samples_per_step: int) -> IntArray:
        """Data-parallel group of each sample ``[samples]`` (intra-microbatch reordering)."""
        if self.intra == "none":
            return np.arange(len(work_s)) // (samples_per_step // num_groups) % num_groups
        step = samples_per_step if self.intra == "microbatch" else len(work_s)
        return balanced_in_steps(work_s, num_groups, step, self.carry)


def reorder(seconds: FloatArray, replica: IntArray, microbatch: IntArray, layout: Layout, profile: Profile) -> IntArray:
    """New place of each sample's microbatch in its replica's order ``[samples]`` (inter-microbatch reordering)."""
    dp = layout.modules[profile.job.model.llm_index].dp
    count = int(microbatch.max(initial=0)) + 1
    shares = stage_shares(layout, profile)
    factor = np.array([module.dp for module in layout.modules])
    # A replica of another group that serves several LLM replicas runs all their microbatches in one place.
    weighted = seconds * (dp / factor)
    forward = np.zeros((dp, count, shares[0].shape[1]))
    backward = np.zeros_like(forward)
    batch = replica * count + microbatch
    for column, share in zip(weighted.T, shares, strict=True):
        work = np.bincount(batch, weights=column, minlength=dp * count).reshape(dp, count)
        forward += work[:, :, None] * share[0]
        backward += work[:, :, None] * share[1]
    filled = np.bincount(batch, minlength=dp * count).reshape(dp, count) > 0
    place = np.empty((dp, count), np.int64)
    with each_replica_alone(dp):
        for r in range(dp):
            present = np.flatnonzero(filled[r])
            place[r, present[interval_order(forward[r, present], backward[r, present])]] = np.arange(len(present))
    return np.asarray(place[replica, microbatch])


def stage_shares(layout: Layout, profile: Profile) -> list[FloatArray]:
    """Forward and backward seconds at each stage of the chain per forward second of a module ``[2, stages]``."""
    behind = stages_behind(layout, profile.job.model.llm_index)
    length = 1 + max(int(stages.max()) for stages in behind)
    shares = []
    for module, placed, after in zip(profile.job.model.modules, layout.modules, behind, strict=True):
        fit = profile.layers.forward_fit(module, placed.tp, placed.cp)
        kind_s = np.maximum(matmul(fit, [1024.0**2, 1024.0, 1.0]), 0.0)
        stage_s = matmul(module.kind_counts(placed.layers_per_stage), kind_s)
        share = np.zeros((2, length))
        np.add.at(share[0], length - 1 - after, stage_s / max(float(stage_s.sum()), 1e-30))
        # 3 x factor is forward and backward together.
        share[1] = share[0] * (3.0 * recompute_factor(placed.recompute) - 1.0)
        shares.append(share)
    return shares


def unit_replicas(
    replica: IntArray, microbatch: IntArray, position: IntArray, layout: Layout, group: slice, llm: int
) -> IntArray | None:
    """Return the replica of each sample outside the LLM's group: brokers join and split the batch in order.

    Of g brokers, the greatest common divisor of both DP, each joins the k-th microbatches of its LLM replicas and
    splits them evenly (reconstructed). None if the group is empty, or has the LLM's DP.
    """
    llm_dp = layout.modules[llm].dp
    dps = {module.dp for module in layout.modules[group]}
    if len(dps) > 1:
        names = ", ".join(module.module for module in layout.modules[group])
        raise IncompatibleError(f"strategy/assigner=disttrain: {names} form one group, so they need the same DP")
    if not dps or (unit_dp := dps.pop()) == llm_dp:
        return None
    brokers = gcd(unit_dp, llm_dp)
    broker = replica // (llm_dp // brokers)
    fan = unit_dp // brokers
    count = int(microbatch.max(initial=0)) + 1
    batch = broker * count + microbatch
    order = np.lexsort((position, replica, batch))
    size = np.bincount(batch, minlength=brokers * count)
    first = np.concatenate(([0], np.cumsum(size)))
    part = np.empty(len(replica), np.int64)
    part[order] = (np.arange(len(replica)) - first[batch[order]]) * fan // size[batch[order]]
    return broker * fan + part
