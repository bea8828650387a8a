"""Order the passes on every rank: seeds, then moves on the slowest replica only, scored by the list scheduler."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, NamedTuple

import numpy as np

from entrain_bench.balancing.chunk_estimates import packed_durations, packed_iteration_s, sync_after_s
from entrain_bench.balancing.chunk_groups import Replica, split_replicas
from entrain_bench.balancing.interleaved import Interleaved
from entrain_bench.balancing.listing import BACKWARD, Wish, list_schedule
from entrain_bench.balancing.options import Amount, Memory
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.recomputation import Recomputation, recompute_all
from entrain_bench.balancing.rounds import packed_program
from entrain_bench.balancing.schedules import ordered_program, unordered_program
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.arrays import FloatArray, IntArray, rows_of
from entrain_bench.base.errors import DeadlockError, IncompatibleError
from entrain_bench.program import Program
from entrain_bench.program.assignment import Assignment
from entrain_bench.program.layout import Layout
from entrain_bench.specs.parse import Allowed, at_least
from entrain_bench.specs.shapes import SampleShapes

# A replica this close to the work of its busiest lane has nothing left to search for.
CLOSE = 1e-3
# Groups that a block moves together at most, and places by which a group's backwards may come sooner or later.
BLOCK = 6
SHIFTS = (0, -8, -3, 3, 8, 20, 60)
# Of the moves these shares put one group elsewhere, a block, swap two, shift backwards; the rest changes lead and hold.
ELSEWHERE = 0.45
TOGETHER = 0.6
SWAPPED = 0.75
SHIFTED = 0.9
# Rollouts for a program that a planner only compares or checks.
DRAFT_ROLLOUTS = 24
# Seconds that a rollout takes for an action (0.38 to 0.53 us on an x86-64 server, 2026-11), the same on all machines,
# and the share of a believed iteration that all rollouts of a program may take by that.
ACTION_S = 0.5e-6
AFFORDED = 0.1
# An order without recomputation is not searched for if the first is so many times as slow as one with it.
HOPELESS = 1.25
SOME = Allowed(bool, "a list with a number")


def listed_replicas(
    draft: Program, assignment: Assignment, profile: Profile, plain: Program | None = None
) -> list[Replica]:
    """The replicas of a program; they may keep what ``draft`` recomputes but ``plain``, the same program, does not."""
    count = int(draft.first_action[-1])
    change, working = (values[:count] for values in profile.memory.action_bytes(draft))
    duration_s = packed_durations(draft, profile)
    kept_bytes = np.zeros(count, np.int64)
    kept_s = np.zeros(count)
    if plain is not None:
        whole, more = (values[:count] for values in profile.memory.action_bytes(plain))
        working = np.maximum(working, more)
        kept_bytes = np.ceil(np.maximum(np.abs(whole) - np.abs(change), 0.0)).astype(np.int64)
        kept_s = np.maximum(duration_s - packed_durations(plain, profile), 0.0)
    handed = profile.programs.handovers(draft)
    partner = np.arange(count)
    for index in range(len(draft.chunks)):
        partner[draft.forward_actions(index)] = draft.backward_actions(index)
    replicas = split_replicas(
        draft,
        assignment,
        profile,
        duration_s,
        change,
        working,
        delay_s=handed.delay_s,
        of_llm=(draft.module[:count] >= draft.model.llm_index).astype(np.int64),
        send_s=handed.send_s[:count],
        receive_s=handed.receive_s[:count],
        tail_s=sync_after_s(draft, profile),
        backward=partner,
        kept_bytes=kept_bytes,
        kept_s=kept_s,
    )
    stage = draft.stage[:count] / float(max(placed.pp for placed in draft.layout.modules))
    # Forwards go along the chain, backwards against it.
    depth = np.where(draft.kind[:count] == BACKWARD, -1, 1) * stage
    return [replace(replica, rank=replica.rank + depth[replica.numbers]) for replica in replicas]


def most_bytes(replica: Replica) -> FloatArray:
    """Bytes which the forwards of a group add to each lane at most ``[lanes]``."""
    actions = replica.actions
    row = rows_of(actions.lane_offsets)
    added = np.zeros((len(replica.members), 1 + int(replica.group.max())))
    np.add.at(added, (actions.lanes, replica.group[row]), (actions.size_bytes * (1 - actions.is_backward))[row])
    return added.max(axis=1)


def floor_s(replica: Replica) -> float:
    """No schedule ends before the busiest lane has done its work."""
    actions = replica.actions
    row = rows_of(actions.lane_offsets)
    work = np.bincount(actions.lanes, (actions.duration_s - actions.is_backward * actions.kept_s)[row])
    tail_s = np.full(len(work), np.inf)
    np.minimum.at(tail_s, actions.lanes, actions.tail_s[row])
    return float((work + tail_s).max())


class Choice(NamedTuple):
    """A point of the search: order of a replica's groups, shifts of backwards, lead of the LLM, and hold."""

    order: IntArray
    shift: IntArray
    lead: int
    hold: float


class Search:
    """Search for a replica's best schedule: its choice, when it ends, and the place of each action."""

    def __init__(self, replica: Replica, options: BraidScheduler) -> None:
        self.replica = replica
        self.options = options
        self.floor_s = floor_s(replica)
        self.end_s = np.inf
        actions = replica.actions
        self.llm_backward_s = float(actions.duration_s[actions.of_llm * actions.is_backward == 1].mean())
        load_s = decisive(np.bincount(replica.group, actions.duration_s * np.diff(actions.lane_offsets)))
        self.seeds = first_choices(load_s, options)
        self.score(self.seeds.pop(0))

    def score(self, choice: Choice) -> None:
        """Make the schedule of a choice, and keep it if it is not slower than the best one."""
        replica = self.replica
        actions = replica.actions
        place = np.empty(len(replica.numbers), np.int64)
        group = np.argsort(choice.order)[replica.group]
        shifted = group + actions.is_backward * choice.shift[replica.group] - choice.lead * actions.of_llm
        hold_s = choice.hold * self.llm_backward_s
        is_held = (actions.of_llm < actions.is_backward) & (hold_s > 0.0) & (hold_s < actions.duration_s)
        priority = np.asarray(shifted * (2.0 * len(place)) + replica.rank, np.float64)
        wish = Wish(group, priority, is_held.astype(np.int64), self.options.alternate, True)
        end_s = list_schedule(actions, wish, place)[0]
        if decisive(end_s) <= decisive(self.end_s):
            self.best = choice
            self.end_s = end_s
            self.place = place


def first_choices(load_s: FloatArray, options: BraidScheduler) -> list[Choice]:
    """The seeds: groups as dealt, and with the lightest at both ends; each with every lead and hold."""
    count = len(load_s)
    still = np.zeros(count, np.int64)
    rising = np.argsort(load_s, kind="stable")
    orders = [np.arange(count)]
    for share in (8, 16, 4):
        ends = max(1, count // share)
        orders.append(np.concatenate([rising[:ends], rising[2 * ends :][::-1], rising[ends : 2 * ends]]))
    return [
        Choice(order, still, lead, hold) for order in orders for lead in options.llm_leads for hold in options.holds
    ]


def moved(choice: Choice, options: BraidScheduler, rng: np.random.Generator) -> Choice:
    """A neighbor of a choice."""
    draw = rng.random()
    order, shift, lead, hold = choice
    count = len(order)
    if draw < TOGETHER or count < 3:
        size = 1 if draw < ELSEWHERE else int(rng.integers(2, BLOCK))
        first = int(rng.integers(count))
        block = order[first : first + size]
        rest = np.delete(order, slice(first, first + size))
        goal = int(rng.integers(len(rest) + 1))
        order = np.concatenate([rest[:goal], block, rest[goal:]])
    elif draw < SWAPPED:
        one, other = rng.integers(count, size=2)
        order = order.copy()
        order[[one, other]] = order[[other, one]]
    elif draw < SHIFTED:
        shift = shift.copy()
        shift[rng.integers(count)] = SHIFTS[int(rng.integers(len(SHIFTS)))]
    else:
        lead = options.llm_leads[int(rng.integers(len(options.llm_leads)))]
        hold = options.holds[int(rng.integers(len(options.holds)))]
    return Choice(order, shift, lead, hold)


def improve(searches: list[Search], rollouts: int) -> None:
    """Search for faster schedules with so many rollouts, all on the slowest replica: first its seeds, then moves."""
    rng = np.random.default_rng(0)
    for _ in range(rollouts):
        slowest = max(searches, key=lambda one: decisive(one.end_s))
        if slowest.end_s <= slowest.floor_s * (1 + CLOSE):
            break
        slowest.score(slowest.seeds.pop(0) if slowest.seeds else moved(slowest.best, slowest.options, rng))


def ordered(draft: Program, searches: list[Search]) -> Program:
    """The program in the order that the searches found."""
    slot = np.zeros(int(draft.first_action[-1]), np.int64)
    for search in searches:
        slot[search.replica.numbers] = search.place
    return ordered_program(draft, slot)


@dataclass(frozen=True, slots=True)
class BraidScheduler(Recomputation):
    """Scheduler that combines list scheduling with a search over the microbatch order on the slowest replica.

    Attributes:
        rollouts: schedules tried after the first of every replica, in total over replicas.
        llm_leads: numbers of microbatches by which LLM passes precede encoder passes; each is tried; (0,): none.
        holds: factors, each tried. Encoder backwards longer than the factor times the LLM's mean backward wait until
            their ranks have finished the LLM; 0: none wait.
        alternate: whether forwards and backwards alternate if both can run; if not, backwards precede.
    """

    handles_generators: ClassVar[bool] = True
    handles_widths: ClassVar[bool] = True
    rollouts: Amount = 256
    llm_leads: Annotated[tuple[Amount, ...], SOME] = (1000, 8)
    holds: Annotated[tuple[Annotated[float, at_least(0)], ...], SOME] = (0, 50, 20)
    alternate: bool = True
    memory: Memory = field(default="greedy", kw_only=True)

    def draft(self) -> BraidScheduler:
        """Return a scheduler with a shorter search."""
        return replace(self, rollouts=min(self.rollouts, DRAFT_ROLLOUTS))

    def schedule(self, shapes: SampleShapes, layout: Layout, assignment: Assignment, profile: Profile) -> Program:
        """The program of a batch; ``IncompatibleError`` if weights are sharded: replicas then need the same order."""
        profile = profile.smoothed()
        if layout.modules[0].widths:
            return packed_program(shapes, layout, assignment, profile)
        if sharded := [placed.module for placed in layout.modules if placed.sharded]:
            raise IncompatibleError(f"schedule: Braid orders each replica, so weights cannot be sharded ({sharded[0]})")
        draft = unordered_program(profile.job.model, shapes, layout, assignment)
        limit = profile.job.planning_budget_bytes
        searches = [Search(replica, self) for replica in listed_replicas(draft, assignment, profile)]
        peak_bytes = profile.memory.peak_bytes(ordered(draft, searches))
        # Where a further microbatch would have fitted beside the most that was held, memory held none up.
        is_ample = all(np.all(peak_bytes[one.replica.members] + most_bytes(one.replica) <= limit) for one in searches)
        rollouts = min(self.rollouts, afforded_rollouts(searches))
        if is_ample or not self.chooses_recomputation or profile.job.request.recompute is not None:
            improve(searches, rollouts)
            return ordered(draft, searches)
        # The list scheduler keeps activations that fit; what it counts as recomputed may fit after all.
        frugal = recompute_all(draft)
        short = [Search(replica, self) for replica in listed_replicas(frugal, assignment, profile, draft)]
        improve(short, rollouts)
        first = self.within_memory(ordered(frugal, short), profile)
        offers = [(packed_iteration_s(first, profile), first)]

        def offer(program: Program) -> None:
            if profile.memory.peak_bytes(program).max() <= limit:
                offers.append((packed_iteration_s(program, profile), program))

        if decisive(max(search.end_s for search in searches)) <= decisive(HOPELESS * offers[0][0]):
            improve(searches, rollouts)
            offer(ordered(draft, searches))
        with suppress(IncompatibleError, DeadlockError):
            # Few microbatches under way, and so the least to recompute; for chains only.
            offer(Interleaved(memory=self.memory).schedule(shapes, layout, assignment, profile))
        return min(offers, key=lambda offered: decisive(offered[0]))[1]


def afforded_rollouts(searches: list[Search]) -> int:
    """Rollouts of a program that take at most their share of the estimated iteration time."""
    believed_s = max(search.end_s for search in searches)
    num_actions = max(len(search.replica.numbers) for search in searches)
    return int(decisive(AFFORDED * believed_s / (ACTION_S * num_actions)))
