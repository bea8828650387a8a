"""The event loop: one clock, one heap of what happens next."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any

from entrain_bench.program import Program
from support.independent.job import Action, Job
from support.independent.sharding import exposed_s, meetings
from support.independent.steps import StepTimes, place_steps, weights_ready
from support.independent.transfers import Traffic, Transfer, traffic_of


@dataclass
class Times:
    """Start and end of every pass, what of it is communication, and the steps."""

    start: dict[Action, float]
    end: dict[Action, float]
    comm: dict[Action, float]
    steps: StepTimes
    job: Job


def simulate(
    model: Mapping[str, Any], cluster: Mapping[str, Any], framework: Mapping[str, Any], program: Program
) -> Times:
    """One iteration of what a strategy decided."""
    job = Job(model, cluster, framework, program)
    clock = _Clock(job, traffic_of(job))
    clock.run()
    comm = {action: job.comm_s(action) + clock.extra[action] for action in clock.end}
    return Times(clock.start, clock.end, comm, place_steps(job, clock.end, clock.traffic.hold_s), job)


@dataclass
class _Clock:
    """Lanes do their actions in order; an event is the end of an action or the readiness of a transfer."""

    job: Job
    traffic: Traffic
    start: dict[Action, float] = field(default_factory=dict)
    end: dict[Action, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.release, self.stall = weights_ready(self.job)
        self.extra: dict[Action, float] = defaultdict(float)
        for added in (self.job.offload_s, exposed_s(self.job)):
            for action, seconds in added.items():
                self.extra[action] += seconds
        self.groups, self.met = meetings(self.job), dict[int, float]()
        self.group_of = {action: number for number, group in enumerate(self.groups) for action in group}
        self.place = [0] * len(self.job.orders)
        self.lane_free = [0.0] * len(self.job.orders)
        self.link_free: dict[object, float] = defaultdict(float)
        self.data_there: dict[Action, float] = defaultdict(float)
        self.missing: dict[Action, int] = defaultdict(int)
        for fed in self.traffic.direct.values():
            for target, _ in fed:
                self.missing[target] += 1
        transfers = {id(each): each for queue in self.traffic.queued.values() for each in queue}
        for transfer in transfers.values():
            for target, _ in (transfer.then or transfer).feeds:
                self.missing[target] += 1
        # At one moment ends come before transfers, so that all that are ready then queue in their order.
        self.events: list[tuple[float, int, tuple[int, ...], int, Action | Transfer]] = []
        self.serial = count()

    def run(self) -> None:
        for lane in range(len(self.job.orders)):
            self._try(lane)
        while self.events:
            now, _, _, _, what = heappop(self.events)
            if isinstance(what, Transfer):
                self._carry(what, now)
            else:
                self._finish(what, now)
        assert len(self.end) == len(self.job.lanes), "deadlock"

    def _try(self, lane: int) -> None:
        """Start a lane's next action if all its lanes are there and all it needs is on its way at a known time."""
        order = self.job.orders[lane]
        if self.place[lane] == len(order):
            return
        action = order[self.place[lane]]
        number = self.group_of.get(action)
        if number is not None and number not in self.met:
            self._meet(number)
            return
        lanes = self.job.lanes[action]
        if action in self.start or not self._arrived(action) or self.missing[action]:
            return
        free = max(self.lane_free[lane] for lane in lanes) if number is None else self.met[number]
        ready = max(self.data_there[action], self.release.get(action, 0.0), free)
        self.start[action] = ready + self.stall.get(action, 0.0)
        took = self.job.took(action) + self.extra[action]
        self._push(self.start[action] + took, 0, (), action)

    def _arrived(self, action: Action) -> bool:
        """Whether all its lanes have come to it."""
        orders = self.job.orders
        return all(
            self.place[lane] < len(orders[lane]) and orders[lane][self.place[lane]] == action
            for lane in self.job.lanes[action]
        )

    def _meet(self, number: int) -> None:
        """Let a group of passes begin when all their lanes are free; each then waits for its own data."""
        group = self.groups[number]
        if not all(self._arrived(action) for action in group):
            return
        lanes = [lane for action in group for lane in self.job.lanes[action]]
        self.met[number] = max(self.lane_free[lane] for lane in lanes)
        for lane in lanes:
            self._try(lane)

    def _finish(self, action: Action, now: float) -> None:
        self.end[action] = now
        for transfer in self.traffic.queued[action]:
            transfer.missing -= 1
            if not transfer.missing:
                self._push(now, 1, transfer.order, transfer)
        for target, delay in self.traffic.direct[action]:
            self._arrive(target, now + delay)
        for lane in self.job.lanes[action]:
            self.place[lane] += 1
            self.lane_free[lane] = now + self.traffic.hold_s[action]
        for lane in self.job.lanes[action]:
            self._try(lane)

    def _carry(self, transfer: Transfer, now: float) -> None:
        """Take all links as soon as they are free, after all that were ready before."""
        done = max(now, *(self.link_free[link] for link in transfer.links)) + transfer.link_s
        self.link_free |= dict.fromkeys(transfer.links, done)
        if transfer.then:
            self._push(done, 1, transfer.then.order, transfer.then)
        for target, delay in transfer.feeds:
            self._arrive(target, done + delay)

    def _arrive(self, target: Action, when: float) -> None:
        self.data_there[target] = max(self.data_there[target], when)
        self.missing[target] -= 1
        for lane in self.job.lanes[target]:
            self._try(lane)

    def _push(self, when: float, rank: int, order: tuple[int, ...], what: Action | Transfer) -> None:
        heappush(self.events, (when, rank, order, next(self.serial), what))
