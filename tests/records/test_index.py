"""The index of record files: it saves reading them, and whatever becomes of it, the answer is that of the files."""

from __future__ import annotations

import json
import os
import pickle
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from entrain_bench.records import index
from entrain_bench.records.records import METRICS, Record, Results, new_record
from entrain_bench.run.cells import compose_cells


@pytest.fixture(scope="module")
def records() -> list[Record]:
    cells = compose_cells(["model=tiny", "cluster=tiny,a40x16", "seed=0,1,2"], multirun=True)
    return [replace(new_record(cell, "ok"), metrics=dict.fromkeys(METRICS, 0.1 + cell.config.seed)) for cell in cells]


@pytest.fixture
def folder(records: list[Record], tmp_path: Path) -> Path:
    for record in records:
        Results(tmp_path).write(record, None)
    assert by_key(tmp_path) == {record.key: record for record in records}
    return tmp_path


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A number for every record file that is read."""
    counts, original = list[int](), index._row_of

    def count(content: bytes, key: str, digest: str) -> index.Row:
        counts.append(len(content))
        return original(content, key, digest)

    monkeypatch.setattr(index, "_row_of", count)
    return counts


def by_key(folder: Path) -> dict[str, Record]:
    return {record.key: record for record in Results(folder).records()}


def test_with_the_index_no_record_file_is_read_and_one_record_is_made_of_each(folder: Path, parsed: list[int]) -> None:
    results = Results(folder)
    found = results.records()
    assert parsed == []
    assert all(results.read(record.key) is record for record in found)
    assert found[0].row() is found[0].row()
    assert found[0].config["model"] is found[1].config["model"]
    # As it is in the file, in its order.
    values = json.loads(results.record_path(found[0].key).read_text())
    assert json.dumps(found[0].config) == json.dumps(values["config"])
    assert pickle.loads(pickle.dumps(results)) == results  # noqa: S301


def test_what_changes_beside_the_index_is_seen(folder: Path, records: list[Record], parsed: list[int]) -> None:
    mine, other = Results(folder), Results(folder)
    mine.records()
    changed = replace(records[0], metrics={**records[0].metrics, "mfu": 0.7})
    other.write(changed, None)
    assert mine.read(changed.key) == changed
    other.record_path(records[1].key).unlink()
    assert mine.read(records[1].key) is None
    # Of the same size, and as old.
    path = mine.record_path(records[2].key)
    before = path.stat()
    path.write_text(path.read_text().replace('"mfu": 2.1', '"mfu": 2.2'))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    found = by_key(folder)
    assert found.keys() == {record.key for record in records} - {records[index].key for index in (1, 2)}
    assert found[changed.key] == changed
    # By ``mine`` and by the folder's reader, who meets the edited one, too; then one is in the index.
    assert len(parsed) == 3
    assert by_key(folder) == found
    assert len(parsed) == 4


def test_a_damaged_index_costs_time_alone(folder: Path, records: list[Record], parsed: list[int]) -> None:
    file, chance = folder / index.FILE, random.Random(0)
    whole, expected = file.read_bytes(), {record.key: record for record in records}
    damaged = [b"", whole[: len(whole) // 2], b"no index at all"]
    for _ in range(20):
        place = chance.randrange(len(whole))
        damaged.append(whole[:place] + bytes([whole[place] ^ 1 << chance.randrange(8)]) + whole[place + 1 :])
    for content in damaged:
        file.write_bytes(content)
        parsed.clear()
        assert by_key(folder) == expected
        assert len(parsed) == len(records)
        assert file.read_bytes() == whole


def test_an_index_of_other_files_is_not_believed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / index.FILE).write_bytes((folder / index.FILE).read_bytes())
    assert by_key(other) == {}


def test_two_writers_leave_a_whole_index(folder: Path, records: list[Record]) -> None:
    mine, other = Results(folder), Results(folder)
    mine.records()
    late = replace(records[0], key="0" * 16)
    other.write(late, None)
    other.records()
    mine.write(replace(records[0], key="f" * 16), None)
    mine.records()
    assert by_key(folder).keys() >= {"0" * 16, "f" * 16}


def test_a_folder_that_cannot_be_written_is_read(folder: Path, records: list[Record]) -> None:
    (folder / index.FILE).unlink()
    (folder / index.FILE).mkdir()
    assert len(by_key(folder)) == len(records)
