"""DynaPipe (arXiv:2311.10418): contiguous cuts of sorted samples, and an order of passes in cycles.

The cuts (section 4) minimize ``(P - 1) max t + sum t / D`` for P stages and D replicas: for limits on the slowest
microbatch that rise by a constant factor, a dynamic program finds the cuts with the least sum. Costs are whole numbers,
so that equal cuts are equal on every machine. Samples are packed.

In every cycle (section 5) a stage runs the first backward that is there, then the first forward that memory allows.
Forwards that run ahead of 1F1B wait for a slow microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Annotated, NamedTuple

import numpy as np

from entrain_bench.balancing.chunk_estimates import stages_s
from entrain_bench.balancing.lpt import largest_differencing, place_in_group
from entrain_bench.balancing.planning import recompute_factor
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.recomputation import Recomputation
from entrain_bench.balancing.schedules import (
    backward_microbatch,
    chain_program,
    microbatches_per_replica,
    stages_behind,
)
from entrain_bench.base.arithmetic import decisive, matmul
from entrain_bench.base.arrays import BoolArray, FloatArray, IntArray, rows_of, sum_rows
from entrain_bench.base.compiled import njit
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.program import Program, Slots, reorder
from entrain_bench.program.assignment import Assignment, Chunks, same_microbatches
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.parse import OneOf
from entrain_bench.specs.shapes import SampleShapes

# The sum of all costs in units of the dynamic program, far below 2^63.
RESOLUTION = 1 << 44
# By how much a limit on the slowest microbatch is above the one before; the estimate is within that of the best cuts.
LIMIT_STEP = 0.05
# Rounds of the clustering; it is stable after some.
ROUNDS = 16
# Classes of microbatches of about equal time, all of whose orders are tried.
CLASSES = 3


@dataclass(frozen=True, slots=True)
class SampleCosts:
    """Estimated costs of an iteration's samples."""

    # Forward through the whole module, without a microbatch's fixed seconds ``[modules, samples]``.
    sample_s: FloatArray
    fixed_s: FloatArray  # fixed seconds of a microbatch with units of the module ``[modules]``
    present: BoolArray  # whether a sample has units of the module ``[modules, samples]``
    # Seconds on each stage of the chain for a second of the module ``[stages, modules]``.
    forward: FloatArray
    backward: FloatArray
    kept_bytes: FloatArray  # kept by a sample on a rank of each stage from forward to backward ``[stages, samples]``
    working_bytes: FloatArray  # temporary memory of a pass ``[stages, samples]``
    available_bytes: FloatArray  # memory that planners may use without states ``[stages]``


def believed_costs(profile: Profile, shapes: SampleShapes, layout: Layout) -> SampleCosts:
    """Costs of the samples under a layout; ``IncompatibleError`` if the modules form no chain, or differ in DP."""
    model = profile.job.model
    behind = stages_behind(layout, model.llm_index)
    if len({placed.dp for placed in layout.modules}) > 1:
        raise IncompatibleError("strategy: DynaPipe replicates whole pipelines, so all modules need the same DP")
    num_stages = 1 + max(int(stages.max()) for stages in behind)
    forward, backward = np.zeros((2, num_stages, len(model.modules)))
    kept, working = np.zeros((2, num_stages, len(shapes)))
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
    """Return each unit's forward seconds in the whole module ``[units]``, and a microbatch's fixed seconds."""
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
    return forward[0] / max(float(forward.sum()), np.finfo(np.float64).tiny), needed


@dataclass(frozen=True, slots=True)
class Cuttable:
    """Ordered samples whose contiguous ranges have a cost."""

    cost: IntArray  # sums over the first samples, on each stage that may be the slowest ``[stages, samples + 1]``
    fixed: IntArray  # fixed cost of a range with units of a module ``[stages, modules]``
    present: IntArray  # number of the first samples with units of a module ``[modules, samples + 1]``
    earliest: IntArray  # first sample that a range may begin with, by where it ends ``[samples + 1]``
    unit_s: float  # seconds of a unit of cost

    def cut(self, num_stages: int, num_replicas: int) -> IntArray:
        """First sample of each range ``[ranges]``; the estimate is at most 1 + ``LIMIT_STEP`` times the least."""
        cuts = np.zeros(1, np.int64)
        whole = int(self.of_ranges(cuts)[0])
        # A stage takes at least its samples' cost without fixed costs.
        least_sum = int((self.cost[:, -1]).max())
        limit = int(self.of_ranges(np.arange(self.cost.shape[1] - 1)).max())
        best = np.inf
        while True:
            starts = cuts_within(self.cost, self.fixed, self.present, self.earliest, limit)
            estimate = self.estimate(starts, num_stages, num_replicas)
            if estimate < best:
                best = estimate
                cuts = starts
            limit = max(limit + 1, int(limit * (1.0 + LIMIT_STEP)))
            hopeless = (num_stages - 1) * limit + least_sum / num_replicas >= best
            if hopeless or limit >= whole * (1.0 + LIMIT_STEP):
                return cuts

    def estimate(self, starts: IntArray, num_stages: int, num_replicas: int) -> float:
        """(P - 1) max t + sum t / D, in units."""
        ranges = self.of_ranges(starts)
        return decisive(float((num_stages - 1) * int(ranges.max()) + int(ranges.sum()) / num_replicas))

    def of_ranges(self, starts: IntArray) -> IntArray:
        """Cost of each range, by where they begin: its slowest stage ``[ranges]``."""
        ends = np.append(starts[1:], self.cost.shape[1] - 1)
        held = self.present[:, ends] > self.present[:, starts]
        once = (self.fixed[:, :, None] * held[None]).sum(axis=1)
        return np.asarray((self.cost[:, ends] - self.cost[:, starts] + once).max(axis=0))


def cuttable(costs: SampleCosts, order: IntArray, num_replicas: int) -> Cuttable:
    """Return ordered samples with costs and limits of their ranges; a single sample is always a range.

    A range takes at most 1/P of the memory, as in the public code, plus temporary memory. Every replica has samples.
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
    """Return the stages than which no other stage is at least as slow in every module; of equal ones the first."""
    no_less = np.all(weight[:, None] >= weight, axis=2)
    more = np.any(weight[:, None] > weight, axis=2)
    first = np.tri(len(weight), k=-1, dtype=np.bool_).T
    return np.flatnonzero(~np.any(no_less & (more | first), axis=0))


@njit()
def earliest_starts(held, room, most):  # type: ignore[no-untyped-def]
    """First sample that a range of at most ``most`` may begin with under memory, by where it ends ``[samples + 1]``."""
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

    ``f(n) = min over i of f(i) + t(i, n)``; of equal sums the longest last range wins. A sample alone is allowed.
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
    starts = [count]
    while starts[-1] > 0:
        starts.append(start[starts[-1]])
    return np.array(starts[:0:-1])


@dataclass(frozen=True, slots=True)
class DynaPipeAssigner:
    """Sorts samples, cuts them into microbatches of least estimated iteration time, balances replicas.

    Attributes:
        order: ``encoder``: by falling encoder tokens, then LLM tokens (the paper's for two lengths); ``arrival``.
    """

    order: Annotated[str, OneOf(("encoder", "arrival"))] = "encoder"

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Replica and microbatch of every sample; ``IncompatibleError`` if modules form no chain, or differ in DP."""
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


class PassOrder(NamedTuple):
    """A replica's passes in order."""

    # Place of each microbatch's pass on its stage, by place in the replica ``[places, stages]``.
    forward: IntArray
    backward: IntArray
    makespan_s: float  # estimated time of it
    peak_bytes: FloatArray  # most that a stage keeps ``[stages]``


@njit()
def cyclic_order(microbatches, forward_s, backward_s, kept_bytes, room_bytes, most_in_flight):  # type: ignore[no-untyped-def]
    """Passes of a replica in order (``PassOrder``), for microbatches that enter in this order ``[places]``.

    Microbatches have estimated seconds of both passes and bytes kept in between ``[microbatches, stages]``. Stages have
    limits of bytes, at least one microbatch's, and of microbatches in flight ``[stages]``.
    """
    count = len(microbatches)
    stages = len(room_bytes)
    forward, backward = np.empty((2, count, stages), np.int64)
    forward_end, backward_end = np.zeros((2, count, stages))
    ready_forward, ready_backward, done_forward, done_backward = np.zeros((4, stages), np.int64)
    held, peak, free = np.zeros((3, stages))
    ready_forward[0] = count
    while done_backward[0] < count:
        handed_forward, handed_backward = np.zeros((2, stages), np.int64)
        for stage in range(stages):
            if done_backward[stage] < ready_backward[stage]:
                place = done_backward[stage]
                one = microbatches[place]
                backward[place, stage] = done_forward[stage] + place
                arrived = backward_end[place, stage + 1] if stage < stages - 1 else forward_end[place, stage]
                backward_end[place, stage] = max(free[stage], arrived) + backward_s[one, stage]
                free[stage] = backward_end[place, stage]
                held[stage] -= kept_bytes[one, stage]
                done_backward[stage] += 1
                if stage > 0:
                    handed_backward[stage - 1] += 1
            place = done_forward[stage]
            if place >= ready_forward[stage]:
                continue
            one = microbatches[place]
            flying = place - done_backward[stage]
            fits = held[stage] + kept_bytes[one, stage] <= room_bytes[stage] and flying < most_in_flight[stage]
            if flying > 0 and not fits:
                continue
            forward[place, stage] = place + done_backward[stage]
            arrived = forward_end[place, stage - 1] if stage > 0 else 0.0
            forward_end[place, stage] = max(free[stage], arrived) + forward_s[one, stage]
            free[stage] = forward_end[place, stage]
            held[stage] = kept_bytes[one, stage] + (held[stage] if flying > 0 else 0.0)
            peak[stage] = max(peak[stage], held[stage])
            done_forward[stage] += 1
            if stage < stages - 1:
                handed_forward[stage + 1] += 1
            else:
                handed_backward[stage] += 1
        ready_forward += handed_forward
        ready_backward += handed_backward
    return forward, backward, free.max(), peak


@dataclass(frozen=True, slots=True)
class DynaPipeScheduler(Recomputation):
    """The order with the least estimated time, over classes of microbatches and cyclic and 1F1B schedules."""

    def schedule(self, shapes: SampleShapes, layout: Layout, assignment: Assignment, profile: Profile) -> Program:
        """The program; ``IncompatibleError`` if the modules form no chain, or differ in DP."""
        model = profile.job.model
        behind = stages_behind(layout, model.llm_index)
        program = chain_program(model, shapes, layout, assignment, behind)
        pipelines = _pipelines(program, behind, profile)
        freed = backward_microbatch(model, shapes, assignment, program.chunks)
        counts = microbatches_per_replica(layout, program.chunks, freed)[model.llm_index]
        # If encoder microbatches would enter after the LLM microbatch that needs them, microbatches keep their order.
        consumer = assignment.modules[model.llm_index].microbatch
        together = all(
            np.array_equal(labels.microbatch, consumer[module.owners(shapes, module.units(shapes))])
            for module, labels in zip(model.modules, assignment.modules, strict=True)
        )
        forward, backward = np.zeros((2, *pipelines.forward_s.shape), np.int64)
        for replica, count in enumerate(counts.tolist()):
            microbatches, best = pipelines.fastest(replica, count, together)
            forward[replica, microbatches] = best.forward
            backward[replica, microbatches] = best.backward
        slots = []
        for rows, last, stages in zip(program.chunks, freed, behind, strict=True):
            place = forward.shape[2] - 1 - stages
            at = rows.replica[:, None]
            slots.append(Slots(forward[at, rows.microbatch[:, None], place], backward[at, last[:, None], place]))
        return self.within_memory(reorder(program, slots), profile)


@dataclass(frozen=True, slots=True)
class Pipelines:
    """Microbatches of all replicas on the stages of their chains."""

    # Estimated seconds ``[replicas, microbatches, stages]``.
    forward_s: FloatArray
    backward_s: FloatArray
    kept_bytes: FloatArray  # kept from forward to backward ``[replicas, microbatches, stages]``
    room_bytes: FloatArray  # limit of kept memory of a stage ``[replicas, stages]``

    def fastest(self, replica: int, count: int, together: bool) -> tuple[IntArray, PassOrder]:
        """Microbatches in the order in which they enter a replica, and their passes in the fastest order that fits.

        1F1B (also if nothing fits) or the adaptive schedule, which waits for memory; reordered if ``together``.
        """
        costs = self.forward_s[replica], self.backward_s[replica], self.kept_bytes[replica]
        room = self.room_bytes[replica]
        no_limit = np.full(len(room), np.inf)
        one_each = np.arange(len(room), 0, -1)
        offers = []
        seconds = (costs[0] + costs[1])[:count].max(axis=1)
        for microbatches in entries(seconds) if together else [np.arange(count)]:
            many = np.full(len(room), count + 1)
            plain = PassOrder(*cyclic_order(microbatches, *costs, no_limit, one_each))
            cyclic = PassOrder(*cyclic_order(microbatches, *costs, no_limit, many))
            if np.any(cyclic.peak_bytes > room):
                cyclic = PassOrder(*cyclic_order(microbatches, *costs, room, many))
            offers += [(microbatches, plain), (microbatches, cyclic)]
        fitting = [offer for offer in offers if np.all(offer[1].peak_bytes <= room)]
        return min(fitting, key=lambda offer: decisive(offer[1].makespan_s), default=offers[0])


def _pipelines(program: Program, behind: list[IntArray], profile: Profile) -> Pipelines:
    """Return estimated seconds and bytes of a program's microbatches."""
    shapes = program.shapes
    layout = program.layout
    costs = believed_costs(profile, shapes, layout)
    num_microbatches = 1 + max(int(rows.microbatch.max(initial=0)) for rows in program.chunks)
    shape = layout.modules[-1].dp, num_microbatches, len(costs.forward)
    forward, backward, kept = np.zeros((3, *shape))
    given, moving = profile.memory.handed_bytes(program)
    spare = profile.job.planning_budget_bytes - profile.memory.lane_state_bytes(layout) - moving
    room, working = np.zeros((2, *shape[::2]))
    for index, (module, placed, blocks, rows) in enumerate(
        zip(program.model.modules, layout.modules, layout.blocks, program.chunks, strict=True)
    ):
        place = len(costs.forward) - 1 - behind[index]
        seconds = np.zeros(shapes.num_items if module.per_item else len(shapes))
        units = module.units(shapes)
        seconds[units], once = unit_costs(module, placed, shapes, profile)
        chunk_s = sum_rows(rows.offsets, seconds[rows.members]) + once
        where = rows.replica[:, None], rows.microbatch[:, None], place
        forward[where] += chunk_s[:, None] * costs.forward[place, index]
        backward[where] += chunk_s[:, None] * costs.backward[place, index]
        tokens = sum_rows(rows.offsets, module.lengths(shapes, rows.members))
        keeps, needs = profile.memory.token_bytes(module, placed)
        kept[where] += tokens[:, None] * keeps
        lanes = blocks.first_lane()
        room[:, place] = spare[lanes]
        kept[:, :, place] = np.maximum(kept[:, :, place], 0.0)
        working[:, place] = np.maximum(working[:, place], needs * tokens.max(initial=0.0))
        if index == program.model.llm_index:
            # A microbatch that is held keeps its own tensors of another module.
            kept[:, :, place] += given[lanes][:, None]
    return Pipelines(forward, backward, kept, room - working)


def entries(seconds: FloatArray) -> Iterator[IntArray]:
    """Yield orders in which microbatches may enter: unchanged, then every order of classes of about equal time."""
    yield np.arange(len(seconds))
    chosen = time_classes(seconds)
    members = [np.flatnonzero(chosen == one) for one in np.unique(chosen)]
    if len(members) > 1:
        for order in permutations(members):
            yield np.concatenate(order)


def time_classes(seconds: FloatArray) -> IntArray:
    """Class of each microbatch by its time, rising, by Lloyd's k-means from quantiles ``[microbatches]``."""
    seconds = decisive(seconds)
    count = min(CLASSES, len(np.unique(seconds)))
    ranked = np.sort(seconds, kind="stable")
    centres = np.unique(ranked[((np.arange(count) + 0.5) * len(ranked) / max(count, 1)).astype(np.int64)])
    chosen = np.zeros(len(seconds), np.int64)
    for _ in range(ROUNDS):
        chosen = np.abs(seconds[:, None] - centres).argmin(axis=1)
        sums = np.bincount(chosen, weights=seconds, minlength=len(centres))
        sizes = np.bincount(chosen, minlength=len(centres))
        centres = np.where(sizes > 0, sums / np.maximum(sizes, 1), centres)
    return np.asarray(chosen)
