"""What processes leave for each other in the user's cache folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from entrain_bench.base.store import MAX_VERSIONS, Store


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
