"""Processes that work jobs off, none of which can take the others down with it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

# What a process that is told to end may take for tidying up.
END_S = 10.0


@dataclass(frozen=True, slots=True)
class Died:
    """What there is instead of a result when a process died over a job."""

    exit_code: int

    def __str__(self) -> str:
        if self.exit_code < 0:
            return f"the process that ran it was killed by {signal.Signals(-self.exit_code).name}"
        return f"the process that ran it ended with exit code {self.exit_code}"


def work_off[Job, Result](
    function: Callable[[Job], Result], jobs: Iterable[Job], num_processes: int
) -> Iterator[tuple[Job, Result | Died]]:
    """Call a function on every job, each in one of several processes; yields jobs and results as they are done.

    Args:
        function: what jobs are done with; it, jobs and results travel between processes.
        jobs: taken one by one, as processes become free.
        num_processes: processes at most; one is started when a job finds none free.
    """
    waiting, busy, idle = iter(jobs), dict[Connection, tuple[_Worker, Job]](), list[_Worker]()
    try:
        while True:
            while len(busy) < num_processes:
                try:
                    job = next(waiting)
                except StopIteration:
                    break
                worker = idle.pop() if idle else _Worker(function)
                worker.connection.send(job)
                busy[worker.connection] = worker, job
            if not busy:
                return
            for connection in wait([*busy]):
                assert isinstance(connection, Connection)
                worker, job = busy.pop(connection)
                try:
                    result = connection.recv()
                except EOFError:
                    yield job, Died(worker.end())
                else:
                    idle.append(worker)
                    yield job, result
    finally:
        left = [*idle, *(worker for worker, _ in busy.values())]
        for worker in left:
            worker.process.terminate()
        for worker in left:
            worker.end()


class _Worker:
    """A process and the line to it; a fresh one, for what this one holds (threads, sockets) may not be forked."""

    def __init__(self, function: Callable[..., object]) -> None:
        # Several processes share the cores already.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(target=_serve, args=(theirs, function))
        self.process.start()
        theirs.close()

    def end(self) -> int:
        """End the process, whatever it does; returns its exit code."""
        self.connection.close()
        self.process.terminate()
        self.process.join(END_S)
        self.process.kill()
        self.process.join()
        return self.process.exitcode or 0


def _serve(connection: Connection, function: Callable[[object], object]) -> None:
    # Ctrl-C reaches every process of the terminal; the one that started this one decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        connection.send(function(job))


def end_with_parent() -> None:
    """End this process as soon as the one that started it is gone, killed or not."""

    def watch() -> None:
        parent = parent_process()
        assert parent
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
