"""Scans in other processes: two workers of Ray give the same bytes, and one that was interrupted goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from entrain_bench_workloads.dataset.interface import BadRecord, Limits, RawSample, Shard
from entrain_bench_workloads.dataset.parquet import ParquetSource
from entrain_bench_workloads.dataset.scan import Scan, read_scan
from support.datasets import image_bytes, write_finevision
from support.processes import descendants_of, eventually, runs

SHARDS = 4
# As many as take seconds.
NUM, ROWS = 24, 800


@dataclass(frozen=True)
class Meeting(ParquetSource):
    """Files whose first two readers wait for each other, and leave their process's number.

    Attributes:
        place: where they leave it.
    """

    place: str = ""

    def samples(self, shard: Shard, limits: Limits) -> Iterator[RawSample | BadRecord]:
        numbers = Path(self.place)
        (numbers / str(os.getpid())).touch()
        assert eventually(lambda: len(list(numbers.iterdir())) > 1), "nobody else reads"
        yield from super().samples(shard, limits)


def write_shards(folder: Path, num: int, rows: int) -> None:
    folder.mkdir()
    for part in range(num):
        good = [([image_bytes(30 + row % 50, 20 + part)], ["x" * row]) for row in range(rows)]
        write_finevision(folder / f"{part:03}.parquet", [*good, ([b"bad"], [])])


@pytest.mark.wide
@pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray")
def test_two_workers_of_a_ray_cluster_give_the_same_bytes(tmp_path: Path) -> None:
    write_shards(tmp_path / "data", SHARDS, 20)
    (tmp_path / "readers").mkdir()
    source = Meeting(path=str(tmp_path / "data"), text="texts", images="images", place=str(tmp_path / "readers"))
    ray, here = (tmp_path / name / "t.parquet" for name in ("ray", "here"))
    report = Scan(source=source, engine="ray", workers=2, timeout_s=100).run(ray)
    assert (report.samples, report.shards, sum(report.counts.values())) == (20 * SHARDS, SHARDS, SHARDS)
    assert len(list((tmp_path / "readers").iterdir())) == 2, "one for each worker"
    Scan(source=source, workers=1).run(here)
    assert here.read_bytes() == ray.read_bytes()


def start(data: Path, output: Path) -> subprocess.Popen[str]:
    """The command, in a group of its own, as in a terminal."""
    command = [sys.executable, "-m", "entrain_bench.cli", "trace", f"source.path={data}", f"output={output}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [*command, "workers=2", "tokenizer=bytes"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )


def blank(file: Path) -> None:
    """Take all but the footer from a Parquet file, which looks unchanged: reading it again would give nothing."""
    content, status = file.read_bytes(), file.stat()
    footer = 8 + int.from_bytes(content[-8:-4], "little")
    file.write_bytes(bytes(len(content) - footer) + content[-footer:])
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.wide
@pytest.mark.parametrize(
    "how",
    [signal.SIGINT, *(pytest.param(how, marks=pytest.mark.slow) for how in (signal.SIGTERM, signal.SIGKILL))],
    ids=lambda how: how.name,
)
def test_an_interrupted_scan_goes_on_where_it_was(tmp_path: Path, how: signal.Signals) -> None:
    data, output, whole = tmp_path / "data", tmp_path / "t" / "t.parquet", tmp_path / "whole" / "t.parquet"
    write_shards(data, NUM, ROWS)
    scan = Scan(source=ParquetSource(path=str(data), text="texts", images="images"), workers=2, tokenizer="bytes")
    scan.run(whole)
    process, parts = start(data, output), output.with_name("t.parquet.parts")
    assert eventually(lambda: len([*parts.glob("*.parquet")]) > 2)
    workers = descendants_of(process.pid)
    # As Ctrl-C does: to all of them. Kills end the command alone.
    os.kill(-process.pid if how == signal.SIGINT else process.pid, how)
    _, err = process.communicate(timeout=60)
    assert process.returncode == (130 if how == signal.SIGINT else -how)
    # loky's tracker of semaphores outlives the command, and names those that it removes.
    said = [line for line in err.splitlines() if "resource_tracker" not in line and "warnings.warn" not in line]
    assert said == (["interrupted; what was finished is kept"] if how == signal.SIGINT else [])
    assert eventually(lambda: not any(map(runs, workers)), 30)
    assert not output.exists()
    kept = [*parts.glob("*.parquet")]
    assert 2 < len(kept) < NUM
    for part in kept:
        blank(data / pq.read_table(part, columns=["sample_id"])["sample_id"][0].as_py().rpartition(":")[0])
    again = start(data, output)
    out, err = again.communicate(timeout=100)
    assert again.returncode == 0, err
    assert f"{NUM * ROWS:,} samples from {NUM} shards" in out
    assert not parts.exists()
    assert pq.read_table(output).equals(pq.read_table(whole))
    found, expected = read_scan(output), read_scan(whole)
    assert found
    assert expected
    assert (found["files"], found["tally"]) == (expected["files"], expected["tally"])
