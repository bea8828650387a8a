"""Whatever a Ray of one's own starts ends with the process that wanted it, killed or not; Ray is a fake here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from entrain_bench.run.ray_cluster import own_cluster
from support.processes import descendants_of, eventually, runs

# Leaves a process to nobody, in a session of its own, and one that is a child of Ray's.
RAY = """
import os, subprocess, sys, time

LEAVE = "import subprocess; print(subprocess.Popen(['sleep', '1000'], start_new_session=True, stdout=2).pid)"


class Context:
    gcs_address = "here:1"


def get_runtime_context():
    return Context


def init(address, num_cpus, **settings):
    if num_cpus == 7:
        raise ValueError("what was tried\\nno room for 7")
    if num_cpus == 8:
        os._exit(1)
    child = subprocess.Popen(["sleep", "1000"])
    left = subprocess.run([sys.executable, "-c", LEAVE], stdout=subprocess.PIPE, text=True).stdout
    with open(os.environ["PIDS"], "w") as file:
        file.write(f"{os.getpid()} {child.pid} {left}")
    if num_cpus == 9:
        time.sleep(1000)
"""
PARENT = """
import time
from entrain_bench.run.ray_cluster import own_cluster
with own_cluster({num_cpus}):
    time.sleep(1000)
"""


@pytest.fixture
def pids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """Puts the fake in Ray's place; the processes that it is, and that it has started."""
    (tmp_path / "ray.py").write_text(RAY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))

    def read() -> list[int]:
        found = (tmp_path / "pids").read_text().split() if (tmp_path / "pids").exists() else []
        return [*map(int, found)]

    return read


def test_what_was_started_ends_when_it_is_not_wanted_any_more(pids: Callable[[], list[int]]) -> None:
    with own_cluster(2) as address:
        assert address == "here:1"
        assert len(pids()) == 3
        assert all(map(runs, pids()))
        assert {*pids()} <= descendants_of(os.getpid()), "an orphan was not adopted"
    assert not any(map(runs, pids()))


@pytest.mark.parametrize("num_cpus", [2, 9], ids=["running", "starting"])
def test_what_was_started_ends_with_a_killed_process(num_cpus: int, pids: Callable[[], list[int]]) -> None:
    path = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-c", PARENT.format(num_cpus=num_cpus)]
    parent = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path})
    assert eventually(lambda: len(pids()) == 3)
    assert all(map(runs, pids()))
    parent.send_signal(signal.SIGKILL)
    parent.wait(60)
    assert eventually(lambda: not any(map(runs, pids())))


@pytest.mark.usefixtures("pids")
@pytest.mark.parametrize(("num_cpus", "says"), [(7, "what was tried\nno room for 7"), (8, "Ray's parent process died")])
def test_a_cluster_that_does_not_start_says_why(num_cpus: int, says: str) -> None:
    with pytest.raises(ConnectionError) as caught, own_cluster(num_cpus):
        pass
    assert str(caught.value) == says
