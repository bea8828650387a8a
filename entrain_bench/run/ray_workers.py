"""Run jobs as tasks of Ray, on this machine or a cluster; a task that dies does not affect the others."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any

from entrain_bench.base.errors import UserError
from entrain_bench.run.ray_cluster import own_cluster
from entrain_bench.run.workers import Died

LAUNCHER = "hydra/launcher=ray"
OUT_OF_MEMORY = "was killed by Ray, for its machine ran out of memory"


def work_off[Job, Result](
    function: Callable[[Job], Result],
    jobs: Iterable[Job],
    num_processes: int,
    address: str | None = None,
    field: str = LAUNCHER,
) -> Iterator[tuple[Job, Result | Died]]:
    """Call a function on every job, each in a task of Ray; yields jobs and results as they are done.

    Workers work in this process' folder, which the cluster's machines must have as well.

    Args:
        function: what jobs are done with; it, jobs and results travel between processes.
        jobs: taken one by one, as workers become free.
        num_processes: jobs at a time at most, at least 1; -1 for as many as there are CPUs.
        address: host and port of a running cluster's head; None for one that is started here, and ends with this
            process.
        field: what errors call the choice of Ray.

    Raises:
        UserError: if Ray is not installed, no cluster answers, or its workers cannot call the function.
    """
    ray = _import_ray(address, field)
    waiting = iter(jobs)
    # Ray takes seconds to start, which nobody waits for who has nothing to do.
    for first in waiting:
        with _connected(ray, num_processes, address, field) as num_cpus:
            yield from _work_off(ray, function, chain([first], waiting), num_cpus, field)


def _work_off[Job, Result](
    ray: Any, function: Callable[[Job], Result], waiting: Iterator[Job], num_cpus: int, field: str
) -> Iterator[tuple[Job, Result | Died]]:
    task = ray.remote(max_retries=0)(_call)
    busy = dict[Any, Job]()
    while True:
        for job in islice(waiting, num_cpus - len(busy)):
            busy[task.remote(pickle.dumps((function, job)), tuple(sys.path), Path.cwd())] = job
        if not busy:
            return
        (done,), _ = ray.wait([*busy])
        yield busy.pop(done), _result(ray, done, field)


def _call(pickled: bytes, search: Sequence[str], folder: Path) -> Any:
    """Call a function on a job, found where the sweep finds it, in the sweep's folder: a worker knows neither."""
    sys.path += [place for place in search if place not in sys.path]
    os.chdir(folder)
    function, job = pickle.loads(pickled)  # noqa: S301
    return function(job)


def _result(ray: Any, done: Any, field: str) -> Any:
    """Return the task's result, or ``Died``."""
    errors = ray.exceptions
    try:
        return ray.get(done)
    except errors.OutOfMemoryError:
        return Died(OUT_OF_MEMORY)
    except (errors.WorkerCrashedError, errors.NodeDiedError, errors.ObjectLostError):
        return Died()
    except errors.RayError as error:
        raise UserError(f"{field}: a Ray worker failed to start ({_last_line(error)})") from error


@contextmanager
def _connected(ray: Any, num_processes: int, address: str | None, field: str) -> Iterator[int]:
    """Inside, Ray is there; yields how many jobs it may have at a time."""
    with ExitStack() as stack:
        try:
            own = own_cluster(_limited(os.cpu_count() or 1, num_processes))
            ray.init(address or stack.enter_context(own), log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError) as error:
            place = f"{field} at {address}" if address else field
            raise UserError(f"{place}: cannot connect to a Ray cluster ({_last_line(error)})") from error
        stack.callback(ray.shutdown)
        yield _limited(int(ray.cluster_resources().get("CPU", 1)), num_processes)


def _limited(num_cpus: int, num_processes: int) -> int:
    return num_processes if num_processes > 0 else num_cpus


def _import_ray(address: str | None, field: str) -> Any:
    """Ray, which reads its environment when it is imported."""
    # It would tell its makers.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not address:
        # As Ray has it where one process starts a cluster and uses it, but here two do.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    try:
        import ray
    except ImportError as error:
        raise UserError(f"{field}: not installed. Run pip install -e '.[ray]'") from error
    return ray


def _last_line(error: Exception) -> str:
    """Return the last line of an error's message."""
    return str(error).strip().rpartition("\n")[2].strip() or type(error).__name__
