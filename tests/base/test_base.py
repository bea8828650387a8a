"""Host times, stores of the user's cache folder, and compiled loops."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from time import sleep

import pytest

from entrain_bench.base.hosttime import HostTime, each_replica_alone, stopwatch
from entrain_bench.base.store import MAX_VERSIONS, Store


def test_work_of_each_replica_counts_once_for_a_cluster() -> None:
    with stopwatch() as time:
        sleep(0.02)
        with each_replica_alone(4):
            sleep(0.04)
        with each_replica_alone(1):
            sleep(0.01)
    assert time.total_s >= 0.07
    assert 0.03 <= time.spread_s <= 0.75 * time.total_s
    with each_replica_alone(4):
        sleep(0.01)
    assert time.spread_s <= 0.75 * time.total_s


def test_a_cluster_waits_for_what_does_not_fit_into_an_iteration() -> None:
    assert HostTime(3.0, 1.5).exposed_s(1.0) == pytest.approx(0.5)
    assert HostTime(3.0, 2.5).exposed_s(1.0) == 0


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "entrain-bench"


def put(version: str, value: int) -> None:
    store = Store("things", version)
    store.put(["key"], value)
    store.save()


def test_later_processes_find_what_was_put_and_other_versions_do_not() -> None:
    put("a", 1)
    assert Store("things", "a").get(["key"]) == 1
    assert Store("things", "b").get(["key"]) is None


def test_versions_used_last_are_kept(cache_folder: Path) -> None:
    for number in range(MAX_VERSIONS):
        put(f"{number}", number)
        os.utime(cache_folder / f"things-{number}.json", (number, number))
    assert Store("things", "0").get(["key"]) == 0
    put("new", -1)
    kept = {file.stem.removeprefix("things-") for file in cache_folder.iterdir()}
    assert kept == {"0", "new", *map(str, range(2, MAX_VERSIONS))}


def test_a_damaged_store_only_costs_time(cache_folder: Path) -> None:
    put("a", 1)
    (cache_folder / "things-a.json").write_text("{")
    assert Store("things", "a").get(["key"]) is None
    (cache_folder / "things-a.json").unlink()
    put("a", 2)
    assert Store("things", "a").get(["key"]) == 2


STEP = """
from entrain_bench.base.compiled import njit

@njit()
def step(value):
    return value + {added}
"""
LOOP = """
from entrain_bench.base.compiled import njit
from mine.step import step

@njit()
def loop(count):
    value = 0
    for _ in range(count):
        value = step(value)
    return value
"""


@pytest.mark.wide
def test_a_loop_is_compiled_anew_when_a_function_of_another_file_changes_that_it_calls(tmp_path: Path) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "loop.py").write_text(LOOP)

    def looped(added: int) -> int:
        (package / "step.py").write_text(STEP.format(added=added))
        call = [sys.executable, "-c", "from mine.loop import loop; print(loop(3))"]
        # Python tells its own compiled files apart by whole seconds.
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
        return int(subprocess.run(call, env=environment, stdout=subprocess.PIPE, check=True).stdout)

    assert [looped(1), looped(2)] == [3, 6]
