"""Run tasks in parallel, in processes of this machine (joblib's loky) or in Ray's pool."""

import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing import parent_process, resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any

from entrain_bench.base.errors import UserError

if TYPE_CHECKING:
    from joblib.externals.loky import ProcessPoolExecutor

# Each process compiles or loads the timed loops and holds about half a GiB.
MAX_PROCESSES = 8
IDLE_S = 60.0
WATCH_S = 0.5

# Executors with one process each, so that a process that dies costs only its task. They stay from one call to the next.
_idle: "list[ProcessPoolExecutor]" = []


@dataclass(frozen=True, slots=True)
class Died:
    """Returned instead of a result if the worker process died during a task."""

    def __str__(self) -> str:
        return "the process that ran it died"


@dataclass(frozen=True, slots=True)
class RayCluster:
    """Host and port of a running Ray cluster (None: a new one on this machine), and its field in errors."""

    address: str | None = None
    field: str = "hydra/launcher=ray"


def num_processes() -> int:
    """Return how many runs commands execute at a time on this machine."""
    return min(os.cpu_count() or 1, MAX_PROCESSES)


def run_parallel[Task, Result](
    function: Callable[[Task], Result], tasks: Iterable[Task], processes: int, cluster: RayCluster | None = None
) -> Iterator[tuple[Task, Result | Died]]:
    """Call a function on tasks in several processes (-1: all CPUs of Ray's cluster); yield each task once it is done.

    Function, tasks and results are pickled; tasks are taken one by one. On Ray the first worker to die ends the call.
    ``UserError`` if Ray is not installed, no cluster answers, or one of its workers dies.
    """
    if cluster:
        yield from _on_ray(function, tasks, processes, cluster)
        return
    waiting = iter(tasks)
    running: dict[Future[Result], tuple[Task, ProcessPoolExecutor]] = {}
    try:
        while True:
            for task in islice(waiting, processes - len(running)):
                call = partial(_call_in_folder, *_packed(function, task))
                executor = _idle.pop() if _idle else _one_process()
                with uninterrupted():
                    try:
                        future = executor.submit(call)
                    except BrokenExecutor:  # Its process died while it was idle.
                        executor = _one_process()
                        future = executor.submit(call)
                    # Known before Ctrl-C can end this call.
                    running[future] = task, executor
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                task, executor = running.pop(future)
                died = isinstance(future.exception(), BrokenExecutor)
                if not died:
                    _idle.append(executor)
                yield task, Died() if died else future.result()
    finally:
        for _, executor in running.values():
            executor.shutdown(kill_workers=True)


def _packed(function: Callable[..., Any], task: object) -> tuple[bytes, tuple[str, ...], Path]:
    return pickle.dumps((function, task)), tuple(sys.path), Path.cwd()


def _call_in_folder(pickled: bytes, search: tuple[str, ...], folder: Path) -> Any:
    """Call a function on a task, with the modules and in the folder of the process that submitted it."""
    sys.path += [place for place in search if place not in sys.path]
    os.chdir(folder)
    function, task = pickle.loads(pickled)  # noqa: S301
    return function(task)


def _one_process() -> "ProcessPoolExecutor":
    # A single run needs no process, and joblib takes a tenth of a second to import.
    from joblib.externals.loky import ProcessPoolExecutor

    # Several processes share the cores already.
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return ProcessPoolExecutor(1, timeout=IDLE_S, initializer=_end_with, initargs=(os.getpid(),), env=threads)


def _end_with(parent: int) -> None:
    """End this process soon after its parent, which may be killed; and ignore Ctrl-C, which the parent handles."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def wait_for_parent() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_S)

    _exit_after(wait_for_parent)


def end_with_parent() -> None:
    """End this process of ``multiprocessing`` as soon as the one that started it is gone, killed or not."""
    parent = parent_process()
    assert parent
    _exit_after(parent.join)


def _exit_after(wait_for_parent: Callable[[], object]) -> None:
    def watch() -> None:
        wait_for_parent()
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Start processes that do not see Ctrl-C, which reaches every process of the terminal."""
    # Started later, it would unblock the signal.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _on_ray[Task, Result](
    function: Callable[[Task], Result], tasks: Iterable[Task], processes: int, cluster: RayCluster
) -> Iterator[tuple[Task, Result]]:
    # Ray reads its environment when it is imported.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        from ray.util.multiprocessing import Pool
    except ImportError as error:
        raise UserError(f"{cluster.field}: not installed. Run pip install -e '.[ray]'") from error
    listed = [*tasks]
    # Ray takes seconds to start, so it starts only if there is a task.
    if not listed:
        return
    calls = [(number, *_packed(function, task)) for number, task in enumerate(listed)]
    wanted = max(processes, 0) or None
    # A cluster that runs already has its CPUs; a new one on this machine is told.
    start = {"address": cluster.address} if cluster.address else {"address": "local", "num_cpus": wanted}
    try:
        with uninterrupted():
            ray.init(log_to_driver=False, logging_level="ERROR", **start)
            pool = Pool(wanted)
        for outcome in pool.imap_unordered(_call_numbered, calls, chunksize=1):
            if isinstance(outcome, Exception):
                raise outcome
            number, result = outcome
            yield listed[number], result
    except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).strip().rpartition("\n")[2].strip() or type(error).__name__
        raise UserError(f"{cluster.field}, address={cluster.address}: Ray failed ({reason})") from error
    finally:
        ray.shutdown()


def _call_numbered(call: tuple[int, bytes, tuple[str, ...], Path]) -> tuple[int, Any]:
    number, pickled, search, folder = call
    return number, _call_in_folder(pickled, search, folder)
