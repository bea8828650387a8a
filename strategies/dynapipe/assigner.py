"""DynaPipe's microbatches: contiguous cuts of sorted samples, dealt to replicas by Karmarkar-Karp.

The cuts (arXiv:2311.10418, section 4) minimise ``(P - 1) max t + sum t / D``: what a pipeline of P stages and D
replicas takes. For every limit on the slowest microbatch a compiled dynamic program finds the cuts with the least sum;
limits rise by a constant factor, so the result is within it of the best there is. All costs are whole numbers, so that
equal cuts are equal on every machine. The paper interpolates profiled times of a layer over batch and padded length;
samples are packed here, so a layer's time is a quadratic of each sequence's length, and what is left at length 0 once a
microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from entrain_bench.balancing.chunk_estimates import stages_s
from entrain_bench.balancing.lpt import largest_differencing, place_in_group
from entrain_bench.balancing.options import check_choices
from entrain_bench.balancing.planning import recompute_factor
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.schedules import stages_behind
from entrain_bench.base.arithmetic import decisive, matmul
from entrain_bench.base.arrays import BoolArray, FloatArray, IntArray, rows_of
from entrain_bench.base.compiled import njit
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.program.assignment import Assignment, Chunks, same_microbatches
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.shapes import SampleShapes


@dataclass(frozen=True, slots=True)
class SampleCosts:
    """Believed costs of an iteration's samples.

    Attributes:
        sample_s: forward through the whole module, but for what a microbatch takes once ``[modules, samples]``.
        fixed_s: what a microbatch with anything for the module takes once ``[modules]``.
        present: whether a sample has anything for the module ``[modules, samples]``.
        forward: seconds of a forward on each stage of the chain for a second of the module ``[stages, modules]``.
        backward: likewise of a backward.
        kept_bytes: what a sample keeps on a rank of each stage from forward to backward ``[stages, samples]``.
        working_bytes: what it needs while a pass runs, likewise.
        available_bytes: what planners may use beside states ``[stages]``.
    """

    sample_s: FloatArray
    fixed_s: FloatArray
    present: BoolArray
    forward: FloatArray
    backward: FloatArray
    kept_bytes: FloatArray
    working_bytes: FloatArray
    available_bytes: FloatArray


def believed_costs(profile: Profile, shapes: SampleShapes, layout: Layout) -> SampleCosts:
    """Costs of the samples under a layout; ``IncompatibleError`` if the modules form no chain, or differ in DP."""
    model = profile.job.model
    behind = stages_behind(layout, model.llm_index)
    if len({placed.dp for placed in layout.modules}) > 1:
        raise IncompatibleError("strategy: DynaPipe replicates whole pipelines, so all modules need the same DP")
    num_stages = 1 + max(int(stages.max()) for stages in behind)
    shape = num_stages, len(model.modules)
    forward = np.zeros(shape)
    backward = np.zeros(shape)
    kept = np.zeros((num_stages, len(shapes)))
    working = np.zeros((num_stages, len(shapes)))
    states = np.zeros(num_stages)
    lane_states = profile.memory.lane_state_bytes(layout)
    seconds = []
    fixed = []
    present = []
    for index, (module, placed) in enumerate(zip(model.modules, layout.modules, strict=True)):
        units = module.units(shapes)
        owner = module.owners(shapes, units)
        variable, once = unit_costs(module, placed, shapes, profile)
        tokens = np.bincount(owner, weights=module.lengths(shapes, units), minlength=len(shapes))
        seconds.append(np.bincount(owner, weights=variable, minlength=len(shapes)))
        fixed.append(once)
        present.append(tokens > 0)
        place = num_stages - 1 - behind[index]
        share, needed = _shares(module, placed, shapes, profile)
        forward[place, index] = share
        # Of three forwards' worth of products, recomputation adds a fourth.
        backward[place, index] = share * (3.0 * recompute_factor(placed.recompute) - 1.0) * needed
        keeps, needs = profile.memory.token_bytes(module, placed)
        kept[place] += keeps[:, None] * tokens
        working[place] = np.maximum(working[place], needs[:, None] * tokens)
        states[place] = lane_states[layout.blocks[index].first_lane()[0]]
    available = np.maximum(profile.job.planning_budget_bytes - states, 0.0)
    return SampleCosts(
        np.array(seconds), np.array(fixed), np.array(present), forward, backward, kept, working, available
    )


def unit_costs(
    module: ModuleSpec, placed: ModuleLayout, shapes: SampleShapes, profile: Profile
) -> tuple[FloatArray, float]:
    """Forward seconds of each unit through the whole module ``[units]``, and of what a microbatch takes once."""
    units = module.units(shapes)
    counts = np.bincount(module.layer_kind, minlength=len(module.kinds))
    a, b, c = matmul(counts, profile.layers.forward_fit(module, placed.tp, placed.cp))
    lengths = module.lengths(shapes, units).astype(np.float64)
    exact = np.maximum((a * lengths + b) * lengths, 0.0)
    return np.asarray(exact * profile.estimates.error_factor(module, shapes)), max(float(c), 0.0)


def _shares(
    module: ModuleSpec, placed: ModuleLayout, shapes: SampleShapes, profile: Profile
) -> tuple[FloatArray, FloatArray]:
    """Share of a module's forward on each stage, and of a full backward's products that are needed ``[stages]``."""
    units = module.units(shapes)
    zero = np.zeros(1, np.int64)
    together = Chunks(zero, zero, zero, np.array([0, len(units)]), units)
    forward, needed = stages_s(module, placed, shapes, together, profile)
    total = float(forward.sum())
    return (forward[0] / total if total > 0 else np.zeros(placed.pp)), needed


# The sum of all costs in the units of the dynamic program, far below what 64 bits hold.
RESOLUTION = 1 << 44
# By how much a limit on the slowest microbatch is above the one before; the estimate is within that of the best cuts.
LIMIT_STEP = 0.05


@dataclass(frozen=True, slots=True)
class Cuttable:
    """Ordered samples whose contiguous ranges have a cost.

    Attributes:
        cost: sums over the first samples, on each stage that may be the slowest ``[stages, samples + 1]``.
        fixed: what a range with anything for a module takes once ``[stages, modules]``.
        present: samples with anything for a module among the first ``[modules, samples + 1]``.
        earliest: first sample that a range may begin with, by where it ends ``[samples + 1]``.
        unit_s: seconds of a unit of cost.
    """

    cost: IntArray
    fixed: IntArray
    present: IntArray
    earliest: IntArray
    unit_s: float

    def cut(self, num_stages: int, num_replicas: int, limit_step: float = LIMIT_STEP) -> IntArray:
        """First sample of each range ``[ranges]``; its estimate is at most 1 + ``limit_step`` times the least.

        Limits on the slowest range rise by that step, for P stages and D replicas.
        """
        num_samples = self.cost.shape[1] - 1
        ends = np.arange(num_samples + 1)
        single = _ranges(self.cost, self.fixed, self.present, ends[:-1], ends[1:])
        whole = int(_ranges(self.cost, self.fixed, self.present, ends[:1], ends[-1:])[0])
        # No stage works less than its samples take without what ranges take once.
        least_sum = int((self.cost[:, -1]).max())
        limit = int(single.max())
        best = np.inf
        cuts = ends[:0]
        while True:
            starts = cuts_within(self.cost, self.fixed, self.present, self.earliest, limit)
            estimate = self.estimate(starts, num_stages, num_replicas)
            if estimate < best:
                best = estimate
                cuts = starts
            limit = max(limit + 1, int(limit * (1.0 + limit_step)))
            hopeless = (num_stages - 1) * limit + least_sum / num_replicas >= best
            if hopeless or limit >= whole * (1.0 + limit_step):
                return cuts

    def estimate(self, starts: IntArray, num_stages: int, num_replicas: int) -> float:
        """(P - 1) max t + sum t / D, in units."""
        ranges = self.of_ranges(starts)
        return decisive(float((num_stages - 1) * int(ranges.max()) + int(ranges.sum()) / num_replicas))

    def of_ranges(self, starts: IntArray) -> IntArray:
        """Cost of each range, by where they begin ``[ranges]``."""
        return _ranges(self.cost, self.fixed, self.present, starts, np.append(starts[1:], self.cost.shape[1] - 1))


def cuttable(costs: SampleCosts, order: IntArray, num_replicas: int) -> Cuttable:
    """The samples in an order, with what ranges of them cost and may hold.

    A range takes as much memory as a pipeline of P microbatches leaves each: a P-th of what there is, the limit of the
    public code, and what it needs besides while it runs. No range holds so many samples that a replica would have none.
    A sample alone is always a range.
    """
    weight = costs.forward + costs.backward
    weight = weight[_undominated(weight)]
    cost = (weight[:, :, None] * costs.sample_s[None]).sum(axis=1)
    fixed = weight * costs.fixed_s
    total = float((cost.sum(axis=1) + fixed.sum(axis=1) * cost.shape[1]).max())
    unit_s = total / RESOLUTION if total > 0 else 1.0
    whole = np.rint(cost[:, order] / unit_s).astype(np.int64)
    stored = costs.kept_bytes[:, order]
    held = np.concatenate([stored * len(costs.forward), stored + costs.working_bytes[:, order]])
    room = np.floor(np.tile(costs.available_bytes, 2)).astype(np.int64)
    most = max(1, len(order) // num_replicas)
    return Cuttable(
        _prefix(whole),
        np.rint(fixed / unit_s).astype(np.int64),
        _prefix(costs.present[:, order].astype(np.int64)),
        earliest_starts(_prefix(np.ceil(held).astype(np.int64)), room, most),
        unit_s,
    )


def _prefix(values: IntArray) -> IntArray:
    """Sums over the first 0, 1, ... entries of each row ``[rows, entries + 1]``."""
    return np.concatenate((np.zeros((len(values), 1), np.int64), np.cumsum(values, axis=1)), axis=1)


def _undominated(weight: FloatArray) -> IntArray:
    """Stages that no other one is at least as slow as in every module; of equal ones the first."""
    no_less = np.all(weight[:, None] >= weight, axis=2)
    more = np.any(weight[:, None] > weight, axis=2)
    first = np.tri(len(weight), k=-1, dtype=np.bool_).T
    return np.flatnonzero(~np.any(no_less & (more | first), axis=0))


@njit()
def earliest_starts(held, room, most):  # type: ignore[no-untyped-def]
    """First sample that a range may begin with, by where it ends ``[samples + 1]``.

    Memory of the first samples is ``[limits, samples + 1]``, the limits' room ``[limits]``; ``most`` samples are a
    range.
    """
    count = held.shape[1] - 1
    earliest = np.zeros(count + 1, np.int64)
    first = 0
    for end in range(1, count + 1):
        first = max(first, end - most)
        for limit in range(len(room)):
            while first < end - 1 and held[limit, end] - held[limit, first] > room[limit]:
                first += 1
        earliest[end] = first
    return earliest


@njit()
def cuts_within(cost, fixed, present, earliest, limit):  # type: ignore[no-untyped-def]
    """First sample of each range of the cuts with the least sum of costs, none above ``limit`` ``[ranges]``.

    ``f(n) = min over i of f(i) + t(i, n)``, over the i that memory and limit allow; of equal sums the longest last
    range wins. A sample alone is always allowed.
    """
    stages = cost.shape[0]
    count = cost.shape[1] - 1
    best = np.zeros(count + 1, np.int64)
    start = np.zeros(count + 1, np.int64)
    for end in range(1, count + 1):
        least = np.int64(-1)
        for first in range(end - 1, earliest[end] - 1, -1):
            slowest = np.int64(0)
            for stage in range(stages):
                slice_s = cost[stage, end] - cost[stage, first]
                for module in range(present.shape[0]):
                    if present[module, end] > present[module, first]:
                        slice_s += fixed[stage, module]
                slowest = max(slowest, slice_s)
            if slowest > limit and first < end - 1:
                break
            if least < 0 or best[first] + slowest <= least:
                least = best[first] + slowest
                start[end] = first
        best[end] = least
    number = 0
    end = count
    while end > 0:
        number = number + 1
        end = start[end]
    starts = np.empty(number, np.int64)
    end = count
    while end > 0:
        number = number - 1
        end = start[end]
        starts[number] = end
    return starts


def _ranges(cost: IntArray, fixed: IntArray, present: IntArray, starts: IntArray, ends: IntArray) -> IntArray:
    """Cost of ranges of samples: their slowest stage ``[ranges]``."""
    held = present[:, ends] > present[:, starts]
    once = (fixed[:, :, None] * held[None]).sum(axis=1)
    return np.asarray((cost[:, ends] - cost[:, starts] + once).max(axis=0))


@dataclass(frozen=True, slots=True)
class DynaPipeAssigner:
    """Sorts samples, cuts them into microbatches of least estimated iteration time, balances replicas.

    Attributes:
        order: ``encoder``: samples by falling encoder tokens, then LLM tokens, the order that the paper has for samples
            of two lengths; ``arrival``: as they come.
    """

    order: str = "encoder"

    def __post_init__(self) -> None:
        check_choices(self, "strategy.assigner", order=("encoder", "arrival"))

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Replica and microbatch of every sample; a replica's microbatches keep the order of the samples.

        Raises:
            IncompatibleError: if the modules form no chain, or differ in DP.
        """
        costs = believed_costs(profile, shapes, layout)
        dp = layout.modules[-1].dp
        samples = np.arange(len(shapes))
        if self.order == "encoder":
            modalities = [name for module in profile.job.model.encoders for name in module.config.modalities]
            samples = np.lexsort((-shapes.llm_tokens, -shapes.encoder_tokens(modalities)))
        ranges = cuttable(costs, samples, dp)
        starts = ranges.cut(len(costs.forward), dp)
        replica = largest_differencing(ranges.of_ranges(starts), dp)
        place = place_in_group(replica)
        microbatch = np.empty(len(samples), np.int64)
        microbatch[samples] = rows_of(np.append(starts, len(samples)))
        return same_microbatches(profile.job.model, shapes, replica[microbatch], place[microbatch], place[microbatch])
