"""Files that are no longer what they were, too large, or cannot be written: one line each, and nothing is lost."""

import errno
import os
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from entrain_bench.cli import run_command
from entrain_bench.records.records import Results

SMALL = ["model=tiny", "cluster=a40x16", "global_batch=32", "microbatch_size=2", "layout.dp=2", "iterations=1"]


def run(folder: Path, *overrides: str) -> int:
    return run_command([*SMALL, "mlflow=false", f"results_dir={folder}", *overrides])


@pytest.mark.wide
def test_a_trace_of_few_bytes_and_too_many_rows_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, rows = tmp_path / "repeated.parquet", 25_000_000
    with pq.ParquetWriter(path, pa.schema([("text_tokens", pa.int32())]), compression="zstd") as writer:
        writer.write_table(pa.table({"text_tokens": pa.array(np.full(rows, 100, np.int32))}), row_group_size=rows)
    assert run(tmp_path / "results", "workload=trace", f"workload.path={path}") == 2
    assert capsys.readouterr().err.endswith(
        "(workload.take=first:1000 reads fewer) would take 3.0 GiB of memory, at most 2 (ENTRAIN_BENCH_MEMORY_GIB)\n"
    )


@pytest.mark.wide
def test_a_user_yaml_that_is_none_is_named_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "strategy").mkdir()
    (tmp_path / "strategy" / "mine.yaml").write_text("name: mine\nplanner: [")
    for multirun in ([], ["--multirun"]):
        assert run(tmp_path / "results", "--config-dir", str(tmp_path), *multirun, "strategy=mine") == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "mine.yaml" in line
        assert "line 2" in line


def test_a_finished_run_is_shown_where_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path) == 0

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("filelock.BaseFileLock.acquire", "entrain_bench.base.files.tempfile.NamedTemporaryFile"):
        monkeypatch.setattr(name, refuse)
    monkeypatch.setattr("os.access", lambda *_: False)
    (trace,) = (tmp_path / "timelines").rglob("*.json")
    trace.unlink()
    capsys.readouterr()
    assert run(tmp_path, "mlflow=true") == 0
    shown = capsys.readouterr()
    assert "s/iter" in shown.out
    assert "internal error" not in shown.err
    assert shown.err.count("Read-only file system") == 3
    assert run(tmp_path, "seed=1") == 2


def test_who_stops_reading_gets_no_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    for arguments in (["--help"], ["figures", "--help"]):
        with suppress(BrokenPipeError), os.fdopen(os.dup(writer), "w") as closed:
            monkeypatch.setattr(sys, "stdout", closed)
            assert run_command(arguments) == 141
    os.close(writer)
    assert capsys.readouterr().err == ""


@pytest.mark.wide
def test_a_sweep_survives_what_cannot_be_written_and_damaged_records(tmp_path: Path) -> None:
    (tmp_path / "timelines").write_text("not a folder")
    assert run(tmp_path, "--multirun", "seed=0,1") == 2
    assert not (tmp_path / "runs").exists(), "no other run is tried"
    (tmp_path / "timelines").unlink()
    assert run(tmp_path, "--multirun", "seed=0,1") == 0
    Results(tmp_path).record_path("foreign").parent.mkdir()
    Results(tmp_path).record_path("foreign").write_text("{")
    assert run(tmp_path, "--multirun", "seed=0,1,2") == 0
    assert len(pd.read_csv(tmp_path / "table.csv")) == 3
