"""Run tasks in parallel, in processes of this machine (joblib's loky) or on Ray; a task that dies costs only itself."""

from __future__ import annotations

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
from itertools import chain, islice
from multiprocessing import parent_process, resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any

from entrain_bench.base.errors import UserError

if TYPE_CHECKING:
    from joblib.externals.loky import ProcessPoolExecutor

# Each process compiles or loads the timed loops and holds about half a GiB.
MAX_PROCESSES = 8
# Seconds after which a process without a task ends.
IDLE_S = 60.0
# How often a process looks whether the process that started it is alive.
WATCH_S = 0.5
# Ray's own address for a new cluster on this machine.
NEW_CLUSTER = "local"
# Results are small; Ray's default is a third of the memory.
OBJECT_STORE_BYTES = 80 * 2**20

# Executors with one process each, so that a process that dies costs only its task. They stay from one call to the next.
_idle: list[ProcessPoolExecutor] = []


@dataclass(frozen=True, slots=True)
class Died:
    """Returned instead of a result if the worker process died during a task."""

    reason: str = "the process that ran it died"

    def __str__(self) -> str:
        return self.reason


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
    """Call a function on every task, in several processes; yield tasks and results as they complete.

    Args:
        function: called in the processes; function, tasks and results are pickled.
        tasks: taken one by one, as processes become free.
        processes: most tasks at a time; on Ray -1: as many as the cluster has CPUs.
        cluster: run on Ray; None: in processes of this machine.

    Raises:
        UserError: if Ray is not installed, no cluster answers, or its workers cannot call the function.
    """
    return _on_ray(function, tasks, processes, cluster) if cluster else _on_this_machine(function, tasks, processes)


def _on_this_machine[Task, Result](
    function: Callable[[Task], Result], tasks: Iterable[Task], processes: int
) -> Iterator[tuple[Task, Result | Died]]:
    used: dict[Future[Result], ProcessPoolExecutor] = {}

    def submit(task: Task) -> Future[Result]:
        executor = _idle.pop() if _idle else _one_process()
        call = _pack(function, task)
        with uninterrupted():
            try:
                future: Future[Result] = executor.submit(*call)
            except BrokenExecutor:  # Its process died while it was idle.
                executor = _one_process()
                future = executor.submit(*call)
            # Known before Ctrl-C can end this call.
            used[future] = executor
        return future

    try:
        for task, future in _as_completed(submit, tasks, processes):
            executor = used.pop(future)
            try:
                result = future.result()
            except BrokenExecutor:
                yield task, Died()
            else:
                _idle.append(executor)
                yield task, result
    finally:
        for executor in used.values():
            executor.shutdown(kill_workers=True)


def _as_completed[Task, Result](
    submit: Callable[[Task], Future[Result]], tasks: Iterable[Task], limit: int
) -> Iterator[tuple[Task, Future[Result]]]:
    """Submit tasks, at most ``limit`` at a time; yield each with its future once that is done."""
    waiting = iter(tasks)
    running: dict[Future[Result], Task] = {}
    while True:
        for task in islice(waiting, limit - len(running)):
            running[submit(task)] = task
        if not running:
            return
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            yield running.pop(future), future


def _pack(function: Callable[..., Any], task: object) -> tuple[Callable[..., Any], bytes, tuple[str, ...], Path]:
    """Return ``_call_in_folder`` and its arguments, for a process that may have started in another folder."""
    return _call_in_folder, pickle.dumps((function, task)), tuple(sys.path), Path.cwd()


def _call_in_folder(pickled: bytes, search: tuple[str, ...], folder: Path) -> Any:
    """Call a function on a task, with the modules and in the folder of the process that submitted it."""
    sys.path += [place for place in search if place not in sys.path]
    os.chdir(folder)
    function, task = pickle.loads(pickled)  # noqa: S301
    return function(task)


def _one_process() -> ProcessPoolExecutor:
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
) -> Iterator[tuple[Task, Result | Died]]:
    # joblib's backend of Ray returns no result before the last one, so these are Ray's own tasks and futures.
    # It reads its environment when it is imported.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise UserError(f"{cluster.field}: not installed. Run pip install -e '.[ray]'") from error
    waiting = iter(tasks)
    # Ray takes seconds to start, so it starts only if there is a task.
    for first in waiting:
        with _connected(ray, processes, cluster) as num_cpus:
            remote = ray.remote(max_retries=0)(_call_in_folder)

            def submit(task: Task, remote: Any = remote) -> Future[Result]:
                _, *arguments = _pack(function, task)
                future: Future[Result] = remote.remote(*arguments).future()
                return future

            for task, future in _as_completed(submit, chain([first], waiting), num_cpus):
                yield task, _ray_result(ray, future, cluster)


def _ray_result(ray: Any, future: Future[Any], cluster: RayCluster) -> Any:
    """Return the task's result, or ``Died``."""
    errors = ray.exceptions
    try:
        return future.result()
    except errors.OutOfMemoryError:
        return Died("Ray killed the process that ran it, because its machine ran out of memory")
    except (errors.WorkerCrashedError, errors.NodeDiedError, errors.ObjectLostError):
        return Died()
    except errors.RayError as error:
        raise UserError(f"{cluster.field}: a Ray worker failed to start ({_last_line(error)})") from error


@contextmanager
def _connected(ray: Any, processes: int, cluster: RayCluster) -> Iterator[int]:
    """Connect to a cluster, or start one; yield how many tasks run at a time."""
    wanted = max(processes, 0) or None
    own = {"num_cpus": wanted, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    try:
        with uninterrupted():
            options = {} if cluster.address else own
            ray.init(cluster.address or NEW_CLUSTER, log_to_driver=False, logging_level="ERROR", **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        place = f"{cluster.field} at {cluster.address}" if cluster.address else cluster.field
        raise UserError(f"{place}: cannot connect to a Ray cluster ({_last_line(error)})") from error
    try:
        yield wanted or int(ray.cluster_resources().get("CPU", 1))
    finally:
        ray.shutdown()


def _last_line(error: Exception) -> str:
    """Return the last line of an error's message."""
    return str(error).strip().rpartition("\n")[2].strip() or type(error).__name__
