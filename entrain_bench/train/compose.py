"""The next iteration's program, composed on rank 0 while the present one runs, and handed to every rank."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter

import torch.distributed as dist

from entrain_bench.experiment import Setting
from entrain_bench.layout import Layout
from entrain_bench.program import Program
from entrain_bench.program.validate import check_program
from entrain_bench.shapes import SampleShapes
from entrain_bench.timeline import Timeline
from entrain_bench.train.control import broadcast_bytes
from entrain_bench.train.wire import program_from_bytes, program_to_bytes


@dataclass(frozen=True, slots=True)
class Composed:
    """A program, how long it took to compose, and how long the ranks waited for it, seconds."""

    program: Program
    assignment_time_s: float
    exposed_s: float


class Composer:
    """Composes programs one iteration ahead in a thread of rank 0."""

    def __init__(self, setting: Setting, layout: Layout, seed: int, control: dist.ProcessGroup) -> None:
        self._setting, self._layout, self._seed, self._control = setting, layout, seed, control
        self._pool = ThreadPoolExecutor(1, "compose") if dist.get_rank() == 0 else None
        self._next: Future[tuple[bytes, float]] | None = None
        self._strategy = setting.strategy
        self._finished: Timeline | None = None

    def close(self) -> None:
        """End the thread."""
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    def take(self, iteration: int, last: bool) -> Composed:
        """The program of an iteration; unless it is the last, the one after it is begun. Collective."""
        started = perf_counter()
        content, assignment_time_s = None, 0.0
        if self._pool:
            future = self._next or self._pool.submit(self._compose, iteration, None)
            content, assignment_time_s = future.result()
            self._next = None if last else self._pool.submit(self._compose, iteration + 1, self._finished)
        content = broadcast_bytes(content, self._control)
        exposed_s = perf_counter() - started
        shapes = self._batch(iteration)
        program = program_from_bytes(content, self._setting.job.model, self._layout, shapes)
        return Composed(program, assignment_time_s, exposed_s)

    def observe(self, timeline: Timeline) -> None:
        """Show the strategy an executed iteration: composing the next but one, it knows what this one took."""
        self._finished = timeline

    def _compose(self, iteration: int, finished: Timeline | None) -> tuple[bytes, float]:
        shapes = self._batch(iteration)
        started = perf_counter()
        if finished:
            self._strategy = self._strategy.observe(finished, self._setting.profile)
        program = self._strategy.compose(shapes, self._layout, self._setting.profile)
        seconds = perf_counter() - started
        check_program(program)
        return program_to_bytes(program), seconds

    def _batch(self, iteration: int) -> SampleShapes:
        job = self._setting.job
        shapes = self._setting.source.batch(iteration, job.global_batch, self._seed)
        job.model.check_shapes(shapes)
        return shapes
