"""Worker processes that run jobs; a process that dies does not affect the others."""

from __future__ import annotations

import fcntl
import os
import pickle
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Self

# Every process compiles the timed loops anew and holds about half a GiB.
MAX_PROCESSES = 8
# What a process that is told to end may take for tidying up.
END_S = 10.0


@dataclass(frozen=True, slots=True)
class Died:
    """Returned instead of a result if the worker process died during a job.

    Attributes:
        how: what became of the process.
    """

    how: str = "died"

    @classmethod
    def with_code(cls, exit_code: int) -> Died:
        """The death that an exit code stands for; negative ones are signals."""
        if exit_code < 0:
            return cls(f"was killed by {_signal_name(-exit_code)}")
        return cls(f"ended with exit code {exit_code}")

    def __str__(self) -> str:
        return f"the process that ran it {self.how}"


def work_off[Job, Result](
    function: Callable[[Job], Result], jobs: Iterable[Job], num_processes: int
) -> Iterator[tuple[Job, Result | Died]]:
    """Call a function on every job, each in one of several processes; yields jobs and results as they are done.

    Args:
        function: what jobs are done with; it, jobs and results travel between processes.
        jobs: taken one by one, as processes become free.
        num_processes: processes at most, at least 1; one is started when a job finds none free.
    """
    with Crew() as crew:
        yield from crew.work_off(function, jobs, num_processes)


def num_processes() -> int:
    """Cells that commands run at a time on this machine."""
    return min(os.cpu_count() or 1, MAX_PROCESSES)


class Crew:
    """Processes that stay from one ``work_off`` to the next, which must all be of the same function."""

    def __init__(self) -> None:
        self._idle: list[_Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _end(self._idle)

    def work_off[Job, Result](
        self, function: Callable[[Job], Result], jobs: Iterable[Job], num_processes: int
    ) -> Iterator[tuple[Job, Result | Died]]:
        """As the function of this name."""
        waiting = iter(jobs)
        busy = dict[Connection, tuple[_Worker, Job]]()
        idle = self._idle
        try:
            while True:
                while len(busy) < num_processes:
                    try:
                        job = next(waiting)
                    except StopIteration:
                        break
                    worker = _give(job, idle, function)
                    busy[worker.connection] = worker, job
                if not busy:
                    return
                for connection in wait([*busy]):
                    assert isinstance(connection, Connection)
                    worker, job = busy.pop(connection)
                    try:
                        result = connection.recv()
                    # The latter where it died before it took the job, or within its answer.
                    except (EOFError, OSError):
                        yield job, Died.with_code(worker.end())
                    else:
                        idle.append(worker)
                        yield job, result
        finally:
            _end([worker for worker, _ in busy.values()])


def _end(workers: Sequence[_Worker]) -> None:
    """End processes, all at once."""
    for worker in workers:
        worker.process.terminate()
    for worker in workers:
        worker.end()


def _give[Job](job: Job, idle: list[_Worker], function: Callable[[Job], object]) -> _Worker:
    """Send a job to a free process that lives, or to a new one; returns whose it is."""
    while idle:
        worker = idle.pop()
        try:
            worker.connection.send(job)
        except OSError:
            worker.end()
        else:
            return worker
    worker = _Worker(function)
    # One that is dead already says so when its answer is read.
    with suppress(OSError):
        worker.connection.send(job)
    return worker


def _signal_name(number: int) -> str:
    """``SIGKILL``; the number of a signal without a name."""
    return signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"


class _Worker:
    """A process and the line to it; a fresh one, for what this one holds (threads, sockets) may not be forked."""

    def __init__(self, function: Callable[..., object]) -> None:
        # Several processes share the cores already.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(target=_serve, args=(theirs, pickle.dumps(function)))
        with uninterrupted():
            self.process.start()
        theirs.close()

    def end(self) -> int:
        """Wait until the process has ended, and end it if that takes long; returns its exit code."""
        self.connection.close()
        self.process.join(END_S)
        self.process.kill()
        self.process.join()
        return self.process.exitcode or 0


def _serve(connection: Connection, pickled: bytes) -> None:
    # The first job comes, or the parent is gone.
    connection.poll(None)
    be_killed_with_parent()
    # Only now, for what it imports takes seconds, in which the parent may be killed.
    function: Callable[[object], object] = pickle.loads(pickled)  # noqa: S301
    while True:
        # Whoever gave jobs may be gone, with what it had not read.
        try:
            job = connection.recv()
        except (EOFError, OSError):
            return
        result = function(job)
        try:
            connection.send(result)
        except OSError:
            return


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C reaches every process of the terminal: those started here inherit that they do not see it."""
    # Started later, it would unblock the signal.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """End this process as soon as the one that started it is gone, killed or not."""

    def watch() -> None:
        parent = parent_process()
        assert parent
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def be_killed_with_parent() -> None:
    """``end_with_parent``, on Linux also while an import or compiled code keeps every thread of Python waiting.

    The kernel does it: the pipe that the parent has kept open since it started this process sends SIGKILL when it
    closes. It would at every write, too, so this is for a process that has heard of its parent after it was started.
    (PR_SET_PDEATHSIG kills at the end of the parent's thread.)
    """
    if sys.platform != "linux":
        end_with_parent()
        return
    parent = parent_process()
    assert parent
    line = parent.sentinel
    fcntl.fcntl(line, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(line, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(line, fcntl.F_SETFL, fcntl.fcntl(line, fcntl.F_GETFL) | os.O_ASYNC)
    # Closed before that.
    if select.select([line], [], [], 0)[0]:
        os._exit(1)
