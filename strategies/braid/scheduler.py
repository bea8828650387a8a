"""Order the passes on every rank by a search over orders of groups.

Seeds come first, then moves on the slowest replica only, each scored by the list scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from entrain_bench.balancing.chunk_estimates import packed_durations, packed_iteration_s, sync_after_s
from entrain_bench.balancing.chunk_groups import chunk_groups, components, split_by_label
from entrain_bench.balancing.interleaved import Interleaved
from entrain_bench.balancing.listing import BACKWARD, ListedActions, Wish, draft_actions, list_lanes, list_schedule
from entrain_bench.balancing.options import check_least
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.recomputation import Recomputation, recompute_all
from entrain_bench.balancing.rounds import packed_program
from entrain_bench.balancing.schedules import ordered_program, unordered_program
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.arrays import FloatArray, IntArray, rows_of
from entrain_bench.base.compiled import njit
from entrain_bench.base.errors import DeadlockError, IncompatibleError, require
from entrain_bench.program import Program
from entrain_bench.program.assignment import Assignment
from entrain_bench.program.layout import Layout
from entrain_bench.specs.shapes import SampleShapes


@dataclass(frozen=True, slots=True)
class Replica:
    """Lanes whose actions depend on each other, and these actions.

    Attributes:
        numbers: of the actions in the program ``[actions]``.
        members: numbers of its lanes in the layout ``[lanes]``.
        actions: what the list scheduler knows of them.
        group: microbatch that each belongs to with all that depends on it, by arrival ``[actions]``.
        inner: place in the group and pass; forwards along the chain, backwards against it ``[actions]``.
        num_groups: how many microbatches it has.
        load_s: believed seconds of each on all lanes together ``[groups]``.
        floor_s: no schedule ends before the busiest lane has done its work.
        llm_backward_s: mean seconds of the LLM's backwards.
        held_s: seconds of each encoder backward, all of which may be held ``[encoder backwards]``.
    """

    numbers: IntArray
    members: IntArray
    actions: ListedActions
    group: IntArray
    inner: FloatArray
    num_groups: int
    load_s: FloatArray = field(init=False)
    floor_s: float = field(init=False)
    llm_backward_s: float = field(init=False)
    held_s: FloatArray = field(init=False)

    @property
    def most_bytes(self) -> FloatArray:
        """Bytes which the forwards of a group add to each lane at most ``[lanes]``."""
        row = rows_of(self.actions.lane_offsets)
        added = np.zeros((len(self.members), self.num_groups))
        size_bytes = self.actions.size_bytes * (1 - self.actions.is_backward)
        np.add.at(added, (self.actions.lanes, self.group[row]), size_bytes[row])
        return added.max(axis=1)

    def __post_init__(self) -> None:
        actions = self.actions
        counts = np.diff(actions.lane_offsets)
        least_s = actions.duration_s - actions.is_backward * actions.kept_s
        work = np.bincount(actions.lanes, np.repeat(least_s, counts), len(actions.room_bytes))
        of_group = np.bincount(self.group, actions.duration_s * counts, self.num_groups)
        object.__setattr__(self, "load_s", decisive(of_group))
        tail_s = np.full(len(work), np.inf)
        np.minimum.at(tail_s, actions.lanes, np.repeat(actions.tail_s, counts))
        object.__setattr__(self, "floor_s", float((work + tail_s).max()))
        of_llm = (actions.of_llm * actions.is_backward).astype(bool)
        object.__setattr__(self, "llm_backward_s", float(actions.duration_s[of_llm].mean()))
        object.__setattr__(self, "held_s", actions.duration_s[actions.of_llm < actions.is_backward])


def split_replicas(draft: Program, assignment: Assignment, profile: Profile) -> list[Replica]:
    """The replicas of a program, whatever its own order; the assignment is what it was made of."""
    layout = draft.layout
    count = int(draft.first_action[-1])
    lane_offsets, lanes = list_lanes(draft)
    row = rows_of(lane_offsets)
    believed, room_bytes = _believed(draft, profile, lanes, row)
    handed = profile.programs.handovers(draft)
    wait = rows_of(draft.dep_offsets)
    need = draft.dep_actions
    first_lane = lanes[lane_offsets[:-1]]
    station = components(layout.num_lanes, first_lane[row], lanes)
    links = np.concatenate([first_lane[wait], first_lane[row]]), np.concatenate([first_lane[need], lanes])
    lane_set = components(layout.num_lanes, *links)
    groups = chunk_groups(draft, assignment, lane_set[first_lane], 1 + int(lane_set.max()))
    chunk = groups.chunk
    first_group = groups.first_group
    is_backward = (draft.kind[:count] == BACKWARD).astype(np.int64)
    partner = np.arange(count)
    for index in range(len(draft.chunks)):
        partner[draft.forward_actions(index)] = draft.backward_actions(index)
    depth = np.where(is_backward, -1, 1) * draft.stage[:count] / float(max(placed.pp for placed in layout.modules))
    actions = draft_actions(
        draft,
        **believed,
        room_bytes=room_bytes,
        delay_s=handed.delay_s,
        of_llm=(draft.module[:count] >= draft.model.llm_index).astype(np.int64),
        send_s=handed.send_s[:count],
        receive_s=handed.receive_s[:count],
        station=station,
        tail_s=sync_after_s(draft, profile),
        backward=partner,
    )
    inner = groups.rank[is_backward, chunk] + depth
    replicas = []
    for one, lanes_of_set in enumerate(split_by_label(lane_set[first_lane], 1 + int(lane_set.max()))):
        if len(lanes_of_set):
            members = np.flatnonzero(lane_set == one)
            count = first_group[one + 1] - first_group[one]
            own_group = groups.group[chunk[lanes_of_set]] - first_group[one]
            replicas.append(
                Replica(lanes_of_set, members, actions.of(lanes_of_set, members), own_group, inner[lanes_of_set], count)
            )
    return replicas


def keeping(replicas: Sequence[Replica], plain: Program, frugal: Program, profile: Profile) -> list[Replica]:
    """The same replicas recomputing as ``frugal`` does, where the list scheduler may keep activations instead."""
    lane_offsets, lanes = list_lanes(frugal)
    believed, room_bytes = _believed(frugal, profile, lanes, rows_of(lane_offsets), plain)
    shorter = []
    for replica in replicas:
        decided = {name: values[replica.numbers] for name, values in believed.items()}
        actions = replica.actions._replace(**decided, room_bytes=room_bytes[replica.members])
        shorter.append(replace(replica, actions=actions))
    return shorter


def _believed(
    program: Program, profile: Profile, lanes: IntArray, row: IntArray, plain: Program | None = None
) -> tuple[dict[str, Any], IntArray]:
    """Recomputation's decisions on actions, by name, and ``room_bytes`` (``ListedActions``).

    Besides arguments as before lanes of all actions, and the action that each of them belongs to ``[entries]``.
    """
    memory = profile.memory
    count = int(program.first_action[-1])
    change, working = (values[:count] for values in memory.action_bytes(program))
    duration_s = packed_durations(program, profile)
    kept_bytes = np.zeros(count, np.int64)
    kept_s = np.zeros(count)
    if plain is not None:
        whole, more = (values[:count] for values in memory.action_bytes(plain))
        working = np.maximum(working, more)
        kept_bytes = np.ceil(np.maximum(np.abs(whole) - np.abs(change), 0.0)).astype(np.int64)
        kept_s = np.maximum(duration_s - packed_durations(plain, profile), 0.0)
    most = np.zeros(program.layout.num_lanes)
    np.maximum.at(most, lanes, working[row])
    extra = memory.posted_bytes(program)
    room = np.floor(profile.job.planning_budget_bytes - memory.lane_state_bytes(program.layout) - extra - most)
    size_bytes = np.ceil(np.abs(change)).astype(np.int64)
    decided = {"duration_s": duration_s, "size_bytes": size_bytes, "kept_bytes": kept_bytes, "kept_s": kept_s}
    return decided, room.astype(np.int64)


# A replica this close to the work of its busiest lane has nothing left to search for.
CLOSE = 1e-3
# A schedule that ends by so much later than the best is not made to its end; far more than ``decisive`` tells apart.
WORSE = 1 + 1e-6
# Groups that a block moves together at most, and places by which a group's backwards may come sooner or later.
BLOCK = 6
SHIFTS = (0, -8, -3, 3, 8, 20, 60)
# Of the moves these shares put one group elsewhere, a block, swap two, shift backwards; the rest changes lead and hold.
ELSEWHERE = 0.45
TOGETHER = 0.6
SWAPPED = 0.75
SHIFTED = 0.9


@dataclass(frozen=True, slots=True)
class Rules:
    """Options that limit schedules.

    Attributes:
        leads: numbers of groups by which LLM passes precede encoder passes.
        holds: encoder backwards longer than this factor times the LLM's mean backward are held; 0: none.
        alternate: see ``Wish``.
    """

    leads: tuple[int, ...]
    holds: tuple[float, ...] = (0.0,)
    alternate: bool = True


@dataclass(frozen=True, slots=True)
class Choice:
    """A point of the search: order of a replica's groups, shifts of backwards, lead of the LLM, and hold."""

    order: IntArray
    shift: IntArray
    lead: int
    hold: float

    def effect(self, replica: Replica) -> tuple[bytes, bytes, int, int]:
        """A value that is equal for choices with the same schedule, such as two leads beyond all groups."""
        most = len(self.order) + int(self.shift.max()) - int(self.shift.min())
        num_held = int(np.sum(replica.held_s > self.hold * replica.llm_backward_s)) if self.hold else 0
        return self.order.tobytes(), self.shift.tobytes(), min(self.lead, most), num_held


@dataclass(slots=True)
class Search:
    """Search for a replica's best schedule; ``known`` says when schedules end, by ``Choice.effect``."""

    replica: Replica
    rules: Rules
    known: dict[tuple[bytes, bytes, int, int], float] = field(init=False, default_factory=dict)
    seeds: list[Choice] = field(init=False)
    best: Choice = field(init=False)
    end_s: float = field(init=False, default=np.inf)
    place: IntArray = field(init=False)

    def __post_init__(self) -> None:
        self.seeds = first_choices(self.replica, self.rules)
        self.place = np.zeros(len(self.replica.numbers), np.int64)
        self.score(self.seeds.pop(0))

    def score(self, choice: Choice) -> None:
        """Make the schedule of a choice, and keep it if it is not slower than the best one."""
        replica = self.replica
        rules = self.rules
        effect = choice.effect(self.replica)
        if effect in self.known and effect == self.best.effect(replica):
            self.best = choice
            return
        if decisive(self.known.get(effect, 0.0)) > decisive(self.end_s):
            return
        place = np.empty_like(self.place)
        self.known[effect] = end_s = _scheduled(
            replica.actions,
            (replica.group, replica.inner),
            (choice.order, choice.shift),
            choice.lead,
            float(choice.hold * replica.llm_backward_s),
            rules.alternate,
            place,
            self.end_s * WORSE,
        )
        if decisive(end_s) <= decisive(self.end_s):
            self.best = choice
            self.end_s = end_s
            self.place = place


@njit(nogil=True)
def _scheduled(  # type: ignore[no-untyped-def]
    actions, labels, moves, lead, hold_s, alternate, place, limit_s
):
    """Return when the schedule of a choice ends; write its order to ``place`` ``[actions]``.

    Labels are group and ``inner`` of each action (``Replica``), moves the order of the groups and shifts of their
    backwards, lead that of the LLM; encoder backwards longer than ``hold_s`` are held, none
    if it is 0. For the others see ``Wish`` and ``list_schedule``.
    """
    (own_group, inner) = labels
    (order, shift) = moves
    count = len(place)
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))
    group = position[own_group]
    priority = np.empty(count)
    is_held = np.zeros(count, np.int64)
    for action in range(count):
        backward = actions.is_backward[action]
        of_llm = actions.of_llm[action]
        shifted = group[action] + backward * shift[own_group[action]] - lead * of_llm
        priority[action] = shifted * (2.0 * count) + inner[action]
        is_held[action] = 0.0 < hold_s < actions.duration_s[action] and of_llm < backward
    wish = Wish(group, priority, is_held, alternate, True)
    return list_schedule(actions, wish, place, limit_s)[0]


def first_choices(replica: Replica, rules: Rules) -> list[Choice]:
    """Return the seeds: groups as dealt, and with the lightest at both ends; each with every lead and hold."""
    count = len(replica.load_s)
    still = np.zeros(count, np.int64)
    rising = np.argsort(replica.load_s, kind="stable")
    orders = [np.arange(count)]
    for share in (8, 16, 4):
        ends = max(1, count // share)
        orders.append(np.concatenate([rising[:ends], rising[2 * ends :][::-1], rising[ends : 2 * ends]]))
    return [Choice(order, still, lead, hold) for order in orders for lead in rules.leads for hold in rules.holds]


def moved(choice: Choice, rules: Rules, rng: np.random.Generator) -> Choice:
    """Return a neighbor of a choice."""
    draw = rng.random()
    count = len(choice.order)
    order = choice.order
    shift = choice.shift
    lead = choice.lead
    hold = choice.hold
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
        lead = rules.leads[int(rng.integers(len(rules.leads)))]
        hold = rules.holds[int(rng.integers(len(rules.holds)))]
    return Choice(order, shift, lead, hold)


def improve(searches: list[Search], rollouts: int) -> None:
    """Search for faster schedules with a total number of rollouts.

    The slowest replica decides the iteration time, so it gets every rollout: first its seeds, then moves.
    """
    rng = np.random.default_rng(0)
    for _ in range(rollouts):
        slowest = max(searches, key=lambda one: decisive(one.end_s))
        if slowest.end_s <= slowest.replica.floor_s * (1 + CLOSE):
            break
        slowest.score(slowest.seeds.pop(0) if slowest.seeds else moved(slowest.best, slowest.rules, rng))


def ordered(draft: Program, searches: list[Search]) -> Program:
    """Return the program in the order that the searches found."""
    slot = np.zeros(int(draft.first_action[-1]), np.int64)
    for search in searches:
        slot[search.replica.numbers] = search.place
    return ordered_program(draft, slot)


# Rollouts for a program that a planner only compares or checks.
DRAFT_ROLLOUTS = 24
# Seconds that a rollout takes for an action (0.38 to 0.53 us on an x86-64 server, numba 0.68, 2026-11), and the share
# of a believed iteration that all rollouts of a program may take by that; a constant, so that all machines agree.
ACTION_S = 0.5e-6
AFFORDED = 0.1
# An order without recomputation is not searched for if the first is so many times as slow as one with it.
HOPELESS = 1.25


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

    rollouts: int = 256
    llm_leads: tuple[int, ...] = (1000, 8)
    holds: tuple[float, ...] = (0, 50, 20)
    alternate: bool = True
    memory: str = field(default="greedy", kw_only=True)

    def __post_init__(self) -> None:
        Recomputation.__post_init__(self)
        check_least(self, "strategy.scheduler", 0, "rollouts")
        for name in ("holds", "llm_leads"):
            values = [*getattr(self, name)]
            require(bool(values) and min(values) >= 0, f"strategy.scheduler.{name}", values, "numbers of 0 or more")

    def draft(self) -> BraidScheduler:
        """Return a scheduler with a shorter search."""
        return replace(self, rollouts=min(self.rollouts, DRAFT_ROLLOUTS))

    def schedule(self, shapes: SampleShapes, layout: Layout, assignment: Assignment, profile: Profile) -> Program:
        """Return the program of a batch.

        ``IncompatibleError`` if weights are sharded, because then all replicas need the same order of passes.
        """
        profile = profile.smoothed()
        if layout.modules[0].widths:
            return packed_program(shapes, layout, assignment, profile)
        if sharded := [placed.module for placed in layout.modules if placed.sharded]:
            why = "because it orders each replica separately"
            raise IncompatibleError(f"schedule: Braid does not support sharded weights ({sharded[0]}), {why}")
        draft = unordered_program(profile.job.model, shapes, layout, assignment)
        limit = profile.job.planning_budget_bytes
        rules = Rules(tuple(self.llm_leads), tuple(self.holds), self.alternate)
        replicas = split_replicas(draft, assignment, profile)
        searches = [Search(replica, rules) for replica in replicas]
        first = ordered(draft, searches)
        peak_bytes = profile.memory.peak_bytes(first)
        # Where a further microbatch would have fitted beside the most that was held, memory held none up.
        is_ample = all((peak_bytes[replica.members] + replica.most_bytes <= limit).all() for replica in replicas)
        rollouts = min(self.rollouts, afforded_rollouts(searches))
        if is_ample or not self.chooses_recomputation or profile.job.request.recompute is not None:
            improve(searches, rollouts)
            return ordered(draft, searches)
        # The list scheduler keeps activations that fit; what it counts as recomputed may fit after all.
        frugal = recompute_all(draft)
        short = [Search(replica, rules) for replica in keeping(replicas, draft, frugal, profile)]
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
    """Return the rollouts of a program that take at most their share of the estimated iteration time."""
    believed_s = max(search.end_s for search in searches)
    num_actions = max(len(search.replica.numbers) for search in searches)
    return int(decisive(AFFORDED * believed_s / (ACTION_S * num_actions)))
