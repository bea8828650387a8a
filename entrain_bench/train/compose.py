"""The next iteration's program: composed on rank 0 and made ready on every rank while the present one runs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from threading import Thread
from time import perf_counter

import torch.distributed as dist

from entrain_bench.experiment import Setting
from entrain_bench.program import Program
from entrain_bench.program.layout import Layout
from entrain_bench.program.timeline import Timeline
from entrain_bench.program.validate import check_program
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.train.control import PlanningGroup
from entrain_bench.train.runtime import Work
from entrain_bench.train.wire import program_from_bytes, program_to_bytes


@dataclass(frozen=True, slots=True)
class Composed:
    """A rank's work for one iteration.

    Attributes:
        work: the work.
        assignment_time_s: what its program took to compose; 0 on other ranks than 0.
        exposed_s: how long this rank had nothing else to do than to wait for it.
    """

    work: Work
    assignment_time_s: float
    exposed_s: float


class Composer:
    """Composes programs one iteration ahead, in a thread of each rank: rank 0 composes, all of them prepare."""

    def __init__(
        self,
        setting: Setting,
        layout: Layout,
        seed: int,
        planning: PlanningGroup,
        prepare: Callable[[Program], Work],
    ) -> None:
        """Begin nothing yet.

        Args:
            setting: the run.
            layout: the planned layout.
            seed: of the batches.
            planning: from now on of these threads alone: the order of calls in a group must be the same on all ranks.
            prepare: makes this rank's work of a program.
        """
        self._setting, self._layout, self._seed, self._prepare = setting, layout, seed, prepare
        self._planning = planning
        self._next: Future[tuple[Work, float]] | None = None
        self._strategy = setting.strategy
        self._finished: Timeline | None = None

    def take(self, iteration: int, last: bool) -> Composed:
        """The work of an iteration; unless it is the last, the one after it is begun. Collective.

        Raises:
            Exception: what composing raised, on rank 0.
            RuntimeError: on the others, once rank 0 is gone.
            ExecutionError: once they have waited too long.
        """
        started = perf_counter()
        future = self._next or _in_thread(partial(self._make, iteration, None))
        work, assignment_time_s = future.result()
        exposed_s = perf_counter() - started
        self._next = None if last else _in_thread(partial(self._make, iteration + 1, self._finished))
        return Composed(work, assignment_time_s, exposed_s)

    def observe(self, timeline: Timeline) -> None:
        """Show rank 0's strategy an executed iteration: composing the next but one, it knows what this one took."""
        self._finished = timeline

    def _make(self, iteration: int, finished: Timeline | None) -> tuple[Work, float]:
        shapes = self._batch(iteration)
        content, assignment_time_s = None, 0.0
        if dist.get_rank() == 0:
            content, assignment_time_s = self._compose(shapes, finished)
        content = self._planning.broadcast(content)
        program = program_from_bytes(content, self._setting.job.model, self._layout, shapes)
        return self._prepare(program), assignment_time_s

    def _compose(self, shapes: SampleShapes, finished: Timeline | None) -> tuple[bytes, float]:
        started = perf_counter()
        if finished:
            self._strategy = self._strategy.observe(finished, self._setting.profile)
        program = self._strategy.program(shapes, self._layout, self._setting.profile)
        seconds = perf_counter() - started
        check_program(program)
        return program_to_bytes(program), seconds

    def _batch(self, iteration: int) -> SampleShapes:
        job = self._setting.job
        shapes = self._setting.source.batch(iteration, job.global_batch, self._seed)
        job.model.check_shapes(shapes)
        return shapes


def _in_thread[T](call: Callable[[], T]) -> Future[T]:
    """What a call will return or raise.

    Its thread is a daemon: those of a pool would keep a rank that failed from ending, while they wait for other ranks.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name="compose", daemon=True).start()
    return future
