"""Jobs worked off in processes: all are done, deaths cost their job only, nothing is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import active_children

import pytest

from entrain_bench.run.workers import Died, work_off
from support.jobs import double, double_or_die, process_and_threads
from support.processes import eventually, own_workers, runs, workers_of


def test_every_job_is_done_once_by_at_most_so_many_processes() -> None:
    assert dict(work_off(double, range(7), 2)) == {number: 2 * number for number in range(7)}
    processes = {result[0] for _, result in work_off(process_and_threads, range(6), 2) if not isinstance(result, Died)}
    assert len(processes) == 2
    assert os.getpid() not in processes
    assert list(work_off(double, [], 2)) == []


def test_a_process_that_dies_costs_its_job_only() -> None:
    done = dict(work_off(double_or_die, [1, -1, 2, -2, 3, 4], 2))
    assert {job: result for job, result in done.items() if job > 0} == {1: 2, 2: 4, 3: 6, 4: 8}
    assert str(done[-1]) == "the process that ran it was killed by SIGKILL"
    assert str(done[-2]) == "the process that ran it ended with exit code 7"


def test_a_process_that_dies_while_it_has_no_job_costs_none() -> None:
    def jobs() -> Iterator[int]:
        yield 1
        (worker,) = {*active_children()} - before
        worker.kill()
        worker.join()
        yield 2

    before = {*active_children()}
    assert dict(work_off(double, jobs(), 1)) == {1: 2, 2: 4}


def test_a_process_that_dies_before_it_takes_its_job_costs_it() -> None:
    def jobs() -> Iterator[int]:
        yield 1
        (worker,) = {*active_children()} - before
        # It is still importing.
        worker.kill()
        yield 2

    before = {*active_children()}
    done = dict(work_off(double, jobs(), 2))
    assert (str(done[1]), done[2]) == ("the process that ran it was killed by SIGKILL", 4)
    assert str(Died.with_code(-35)) == "the process that ran it was killed by signal 35"


def test_who_stops_listening_leaves_no_process_behind() -> None:
    before = own_workers()
    for _ in work_off(double, iter(range(1000)), 2):
        assert own_workers() - before
        break
    assert own_workers() <= before


PARENT = """
from entrain_bench.run.workers import work_off
from support.jobs import {job}
for _ in work_off({job}, [1, 2], 2):
    pass
"""


@pytest.mark.wide
@pytest.mark.parametrize(
    ("number", "job"),
    [
        (signal.SIGINT, "wait_forever"),
        (signal.SIGKILL, "wait_forever"),
        (signal.SIGKILL, "keep_threads_waiting"),
        (signal.SIGKILL, "slow_to_load"),
    ],
)
def test_processes_end_with_the_one_that_started_them(number: signal.Signals, job: str) -> None:
    path = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-c", PARENT.format(job=job)]
    parent = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path})
    assert eventually(lambda: len(workers_of(parent.pid)) == 2)
    workers = workers_of(parent.pid)
    parent.send_signal(number)
    parent.wait(60)
    assert eventually(lambda: not any(map(runs, workers)))
