"""Scans give the same bytes whatever happens; deaths and damage cost a sample or a file, finished work is kept."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from entrain_bench.base.errors import ExecutionError, UserError
from entrain_bench.commands.trace_page import _scan_lines
from entrain_bench_workloads.columns import read_columns
from entrain_bench_workloads.dataset import scan as scan_module
from entrain_bench_workloads.dataset.fields import Known, RawSample, Row
from entrain_bench_workloads.dataset.formats import FileSource
from entrain_bench_workloads.dataset.report import ScanReport, sampling_errors
from entrain_bench_workloads.dataset.scan import Scan, read_scan
from entrain_bench_workloads.dataset.source import Limits, Reason, Shard
from support.datasets import image_bytes, run_here, write_finevision
from support.processes import descendants_of, eventually, runs


@dataclass(frozen=True)
class Numbers:
    """Shards of samples of which one may be deadly.

    Attributes:
        shards_of: samples of each shard.
        deadly: label and number of the sample that is.
        how: ``kill``, ``hang``, ``raise``, ``network``.
        only_once: the file that says that it happened.
    """

    shards_of: tuple[int, ...] = (3, 2, 4)
    deadly: tuple[str, int] | None = None
    how: str = ""
    only_once: str = ""

    def shards(self) -> Sequence[Shard]:
        return [Shard(f"s{index}", "1", "", part=(count,)) for index, count in enumerate(self.shards_of)]

    def folder(self, shard: Shard) -> str:
        return shard.place

    def sample(self, row: RawSample, _: str) -> RawSample:
        return row

    def rows(self, shard: Shard, limits: Limits) -> Iterator[RawSample]:
        del limits
        for number in range(shard.part[0]):
            if (shard.label, number) == self.deadly and self.how in ("raise", "network"):
                self._fail()
            images = [Known(10 + number, 20)]
            if (shard.label, number) == self.deadly and self.how in ("kill", "hang"):
                images = [Deadly(self.how)]  # type: ignore[list-item]
            yield RawSample(["x" * number], images)

    def _fail(self) -> None:
        if self.how == "raise":
            raise RuntimeError("not what was expected")
        if not Path(self.only_once).exists():
            Path(self.only_once).touch()
            raise ConnectionResetError("by peer")


class Deadly:
    """A medium whose header ends the process."""

    def __init__(self, how: str) -> None:
        self._how = how

    def __fspath__(self) -> str:
        return ""

    def open(self, *_: object, **__: object) -> None:
        if self._how == "kill":
            os.kill(os.getpid(), 9)
        time.sleep(60)


def run(source: object, output: Path, **options: object) -> ScanReport:
    return Scan(source=source, workers=1, **options).run(output)  # type: ignore[arg-type]


@pytest.mark.wide
def test_a_trace_has_every_sample_once_in_its_order(tmp_path: Path) -> None:
    told: list[tuple[int, int, int]] = []
    report = Scan(source=Numbers(), workers=2).run(tmp_path / "t.parquet", lambda *each: told.append(each))
    frame = pd.read_parquet(tmp_path / "t.parquet")
    assert frame["sample_id"].tolist() == [f"s{s}:{n}" for s, count in enumerate((3, 2, 4)) for n in range(count)]
    assert frame["image_widths"].map(list).tolist() == [[10 + n] for count in (3, 2, 4) for n in range(count)]
    assert (report.samples, report.shards, sum(report.counts.values())) == (9, 3, 0)
    assert sorted(told) == [(3, 2, 0), (3, 3, 0), (3, 4, 0)]
    assert [path.name for path in tmp_path.iterdir()] == ["t.parquet"]
    assert len(read_columns(tmp_path / "t.parquet").text) == 9


@pytest.mark.wide
def test_what_was_finished_is_not_scanned_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(Numbers(), tmp_path / "whole.parquet")
    once = Numbers(deadly=("s1", 1), how="network", only_once=str(tmp_path / "failed"))
    with pytest.raises(
        ExecutionError, match=r"1 of 3 shards could not be scanned \(s1: by peer\). The other shards are kept"
    ):
        run(once, tmp_path / "t.parquet")
    assert not (tmp_path / "t.parquet").exists()
    assert len(list((tmp_path / "t.parquet.parts").glob("*.parquet"))) == 2
    scanned = []
    real = scan_module.run_parallel

    def spied(*arguments: Any) -> Iterator[object]:
        for job, result in real(*arguments):
            scanned.append(job.shard.label)  # type: ignore[attr-defined]
            yield job, result

    monkeypatch.setattr(scan_module, "run_parallel", spied)
    run(once, tmp_path / "t.parquet")
    assert scanned == ["s1"]
    whole, other = (pq.read_table(tmp_path / f"{name}.parquet") for name in ("whole", "t"))
    assert whole.equals(other)
    assert run(once, tmp_path / "t.parquet").again
    assert scanned == ["s1"]
    assert not run(replace(once, shards_of=(3, 2, 5)), tmp_path / "t.parquet").again
    assert sorted(scanned) == ["s0", "s1", "s1", "s2"]


def test_more_rows_than_wanted_are_a_random_part_of_the_shards(tmp_path: Path) -> None:
    source = Numbers(shards_of=(10,) * 40)
    with patch.object(scan_module, "run_parallel", run_here):
        report = run(source, tmp_path / "t.parquet", max_rows=95)
        whole = run(source, tmp_path / "all.parquet", max_rows=None)
        assert run(source, tmp_path / "t.parquet", max_rows=95).again
    names = pq.read_table(tmp_path / "t.parquet")["sample_id"].to_pylist()
    shards = list(dict.fromkeys(name.partition(":")[0] for name in names))
    assert (report.samples, report.shards, report.all_shards) == (100, 10, 40)
    # In the order of the data, and not its first.
    assert shards == sorted(shards, key=lambda name: int(name[1:])) != [f"s{number}" for number in range(10)]
    # Nobody knows how many rows the others have.
    for name, wanted in (("t", [None] * 100), ("all", [*range(400)])):
        assert pq.read_table(tmp_path / f"{name}.parquet")["dataset_row"].to_pylist() == wanted
    # Shards that are the same tell means without error.
    assert report.errors == {"text": 0.0, "images": 0.0}
    lines = [*_scan_lines({"_target_": "tests.Numbers"}, report)]
    assert lines[0] == "100 samples from 10 shards of Numbers (Numbers)."
    said = "Means may be off by (95% confidence): text 0.0%, images 0.0%. To scan all, set max_rows=null."
    assert lines[1] == f"A random part of 40 shards. {said}"
    assert (whole.samples, whole.all_shards, whole.errors) == (400, 40, {})


def test_stated_errors_of_a_random_part_hold_nineteen_times_in_twenty() -> None:
    rng = np.random.default_rng(0)
    # Rows of a shard are alike: their mean is the shard's.
    rows = [rng.poisson(rng.uniform(50, 500), rng.integers(5, 30)) for _ in range(60)]
    shards = [ScanReport(len(chars), sums={"text": float(chars.sum())}) for chars in rows]
    everything = np.concatenate(rows).mean()
    held = 0
    for _ in range(100):
        drawn = [shards[number] for number in rng.choice(60, 12, replace=False)]
        found = sum(each.sums["text"] for each in drawn) / sum(each.samples for each in drawn)
        held += abs(found / everything - 1) <= sampling_errors(drawn, 60)["text"]
    assert 85 <= held <= 100


@pytest.mark.wide
@pytest.mark.parametrize(("how", "what"), [("kill", "died"), ("hang", "timeout_s=1")])
def test_a_deadly_sample_costs_its_shard(tmp_path: Path, how: str, what: str) -> None:
    source = Numbers(deadly=("s2", 1), how=how)
    with pytest.raises(ExecutionError, match=rf"1 of 3 shards could not be scanned \(s2: .*{what}"):
        run(source, tmp_path / "t.parquet", timeout_s=1.0)
    assert len(list((tmp_path / "t.parquet.parts").glob("*.parquet"))) == 2


def test_a_file_that_ends_in_an_error_is_kept_up_to_there(tmp_path: Path) -> None:
    report = run(Numbers(deadly=("s0", 1), how="raise"), tmp_path / "t.parquet")
    assert report.samples == 1 + 2 + 4
    assert [*map(tuple, report.listed)] == [("s0:1 and later", f"{Reason.FILE}: RuntimeError: not what was expected")]


def test_bad_files_beside_good_ones(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    rows = [([image_bytes(30, 20)], ["ab"]), ([b"no image"], ["ab"]), ([], [])]
    write_finevision(data / "good.parquet", rows)
    (data / "bad.parquet").write_bytes(b"PAR1 it is not")
    (data / "cut.parquet").write_bytes((data / "good.parquet").read_bytes()[:-40])
    report = run(FileSource(path=str(data), text="texts", images="images"), tmp_path / "t.parquet")
    assert report.samples == 1
    assert dict(report.counts) == {Reason.FILE: 2, Reason.FORMAT: 1, Reason.EMPTY: 1}
    assert {name.partition(" ")[0] for name, _ in report.listed} == {
        *("bad.parquet:0", "cut.parquet:0", "good.parquet:1", "good.parquet:2")
    }
    found = read_scan(tmp_path / "t.parquet")
    assert found is not None
    assert found["tally"]["counts"] == dict(report.counts)
    assert found["source"]["kind"] == "FileSource"


@pytest.mark.wide
def test_data_without_a_good_sample_is_one_line(tmp_path: Path) -> None:
    write_finevision(tmp_path / "a.parquet", [([b"x"], ["t"])] * 2)
    with pytest.raises(UserError, match="no valid sample \\(2 no known format\\)"):
        run(FileSource(path=str(tmp_path), text="texts", images="images"), tmp_path / "t" / "t.parquet")


def test_rows_keep_their_places_in_the_data_set(tmp_path: Path) -> None:
    for file in range(2):
        write_finevision(tmp_path / f"{file}.parquet", [([], ["a"]), ([b"bad"], ["b"]), ([], ["c"])], row_group=2)
    with patch.object(scan_module, "run_parallel", run_here):
        run(FileSource(path=str(tmp_path)), tmp_path / "t" / "t.parquet")
    assert pq.read_table(tmp_path / "t" / "t.parquet")["dataset_row"].to_pylist() == [0, 2, 3, 5]


def test_another_s_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "mine.parquet"
    pd.DataFrame({"text_tokens": [1]}).to_parquet(path)
    with pytest.raises(UserError, match="exists, but is not a trace of a scan"):
        run(Numbers(), path)


@pytest.mark.wide
def test_many_bad_samples_are_counted_and_the_first_listed(tmp_path: Path) -> None:
    write_finevision(tmp_path / "a.parquet", [([b"x\x1b[31m"], ["t"])] * 50 + [([], ["good"])])
    report = run(FileSource(path=str(tmp_path), text="texts", images="images"), tmp_path / "t" / "t.parquet")
    assert sum(report.counts.values()) == 50
    assert [name for name, _ in report.listed] == [f"a.parquet:{row}" for row in range(20)]


SHARDS = 4
# As many as take seconds.
NUM, ROWS = 24, 800


@dataclass(frozen=True)
class Meeting(FileSource):
    """Files whose first two readers wait for each other, and leave their process's number.

    Attributes:
        place: where they leave it.
    """

    place: str = ""

    def rows(self, shard: Shard, limits: Limits) -> Iterator[Row]:
        numbers = Path(self.place)
        (numbers / str(os.getpid())).touch()
        assert eventually(lambda: len(list(numbers.iterdir())) > 1), "nobody else reads"
        yield from super().rows(shard, limits)


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
    scan = Scan(source=FileSource(path=str(data), text="texts", images="images"), workers=2, tokenizer="bytes")
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
    assert said == (["interrupted; finished parts are kept"] if how == signal.SIGINT else [])
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
