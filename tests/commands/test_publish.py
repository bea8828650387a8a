"""What a sweep ends with takes no more memory than it must."""

from __future__ import annotations

import gc
from pathlib import Path

import pandas as pd
import pytest

from entrain_bench.commands.publish import publish
from entrain_bench.records.records import Record, Results, new_record
from entrain_bench.run.cells import compose_cells


def alive() -> int:
    """Records that somebody holds."""
    gc.collect()
    return sum(isinstance(one, Record) for one in gc.get_objects())


@pytest.mark.wide
def test_those_of_the_tables_are_gone_when_the_others_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, before = Results(tmp_path), alive()
    for cell in compose_cells(["model=tiny", "seed=0,1,2"], multirun=True):
        results.write(new_record(cell, "failed", "a test"), None)
    held, read = list[int](), Results.read

    def count(results: Results, key: str) -> Record | None:
        held.append(alive() - before)
        return read(results, key)

    monkeypatch.setattr(Results, "read", count)
    keys = sorted(path.stem for path in tmp_path.rglob("runs/*/*.json"))
    assert [
        record.key for record in publish(results, dict.fromkeys([*keys, "none"], ""), "a sweep", False, None)
    ] == keys
    assert len(pd.read_csv(tmp_path / "table.csv")) == 3
    assert held[0] == 0
