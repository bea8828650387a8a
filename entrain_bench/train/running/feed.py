"""The next iteration's program: made on rank 0 and made ready on every rank while the present one runs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from threading import Thread
from time import perf_counter

import numpy as np
import torch.distributed as dist

from entrain_bench.base.arrays import IntArray
from entrain_bench.base.hosttime import HostTime
from entrain_bench.program import Program
from entrain_bench.program.timeline import Timeline
from entrain_bench.program.validate import check_program
from entrain_bench.run.experiment import Feed
from entrain_bench.train.messages.control import PlanningGroup
from entrain_bench.train.messages.positions import believed_order
from entrain_bench.train.messages.wire import program_from_bytes, program_to_bytes
from entrain_bench.train.running.runtime import Work


class WorkFeed:
    """Makes programs one iteration ahead, in a thread of each rank: rank 0 makes them, all of them prepare."""

    def __init__(self, feed: Feed, planning: PlanningGroup, prepare: Callable[[Program, IntArray], Work]) -> None:
        """Begin nothing yet; only this object's threads use ``planning``, whose calls all ranks make in one order."""
        self._feed = feed
        self._planning = planning
        self._prepare = prepare
        self._next: Future[tuple[Work, HostTime]] | None = None
        self._executed: Timeline | None = None

    def take(self, iteration: int, last: bool) -> tuple[Work, HostTime, float]:
        """The work of an iteration, or what making it raised; unless it is the last, the next is begun. Collective.

        With it comes what rank 0 took to make its program, and the seconds that this rank only waited for it.
        """
        started = perf_counter()
        future = self._next or self._begin(iteration)
        work, host_time = future.result()
        exposed_s = perf_counter() - started
        self._next = None if last else self._begin(iteration + 1)
        return work, host_time, exposed_s

    def believed_s(self, program: Program) -> float:
        """Iteration time of a program by the estimates of the run's profile, in seconds."""
        return self._feed.believed_s(program)

    def observe(self, timeline: Timeline) -> None:
        """Show rank 0's strategy an executed iteration: making the next but one, it knows what this one took."""
        self._executed = timeline

    def _begin(self, iteration: int) -> Future[tuple[Work, HostTime]]:
        # Now, when no thread is at work: the one that runs beside an iteration must not see how it ends.
        if self._executed is not None:
            self._feed.observe(self._executed)
            self._executed = None
        return _in_thread(partial(self._make, iteration))

    def _make(self, iteration: int) -> tuple[Work, HostTime]:
        feed = self._feed
        content = None
        order = None
        host_time = HostTime()
        shapes = feed.batch(iteration)
        if dist.get_rank() == 0:
            program, host_time = feed.program(shapes)
            check_program(program)
            content = program_to_bytes(program)
            order = believed_order(program, feed.setting.profile.under(feed.layout)).tobytes()
        content, order = (self._planning.broadcast(each) for each in (content, order))
        program = program_from_bytes(content, feed.setting.job.model, feed.layout, shapes)
        return self._prepare(program, np.frombuffer(order, np.int64)), host_time


def _in_thread[T](call: Callable[[], T]) -> Future[T]:
    """A call's future result or error; a thread of a pool would keep a failed rank from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name="feed", daemon=True).start()
    return future
