"""Small files that unpack to more than memory holds are refused in one line, long before memory is short."""

import gzip
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from subprocess import run
from sys import executable

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from entrain_bench.base.errors import UserError
from entrain_bench_workloads.budget import Budget
from entrain_bench_workloads.dataset import members, readers
from entrain_bench_workloads.dataset.formats import FileSource
from entrain_bench_workloads.dataset.source import BadSampleError, Limits
from entrain_bench_workloads.trace import TraceWorkload
from support.datasets import samples_of, write_tar
from support.specs import rules_of

RULES = rules_of("qwen25vl")

GIB = 2**30
# The command in a process that the kernel ends at 60 CPU seconds and gives 4 GiB more than it takes after its imports.
GUARDED = """
import resource, sys
from pathlib import Path
import torch, entrain_bench.commands.trace, entrain_bench.cli as cli
from entrain_bench_workloads.trace import TraceWorkload
from entrain_bench_workloads.dataset import scan
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + 4 * 2**30, taken + 4 * 2**30))
try:
    code = cli.main()
except SystemExit as error:
    code = error.code
# What ru_maxrss says of a process counts its parent's memory at its start.
(own,) = [int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line]
print("peak", 1024 * max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
sys.exit(code)
"""


def refused(*arguments: str) -> tuple[str, int]:
    """The one line that a command ends with, and the most memory that it and its processes took."""
    done = run([executable, "-c", GUARDED, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.strip().splitlines()
    return line, int(done.stdout.rpartition("peak ")[2])


@pytest.fixture(scope="module")
def bomb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 million list entries in a kilobyte, of a trace's column that a data set may have, too."""
    path = tmp_path_factory.mktemp("bomb") / "a.parquet"
    # Written in a process of its own, for it takes a gigabyte.
    code = (
        "import sys; sys.path[:0] = sys.argv[1:2]\nfrom pathlib import Path\n"
        "from support.datasets import write_repeated\n"
        "write_repeated(Path(sys.argv[2]), 200_000_000, 'image_widths', 7)"
    )
    run([executable, "-c", code, str(Path(__file__).parents[2]), path], check=True, timeout=120)
    assert path.stat().st_size < 7000
    return path


@pytest.mark.wide
def test_a_trace_of_200_million_list_entries_is_one_line(bomb: Path, tmp_path: Path) -> None:
    line, peak = refused("workload=trace", f"workload.path={bomb}", f"results_dir={tmp_path}")
    assert f"workload.path={bomb}: 200,000,001 values would take 4.5 GiB of memory, at most 2" in line
    assert peak < 1.5 * GIB


@pytest.mark.wide
def test_a_data_set_of_200_million_list_entries_is_one_line(bomb: Path, tmp_path: Path) -> None:
    output = f"output={tmp_path / 'o.parquet'}"
    line, peak = refused("trace", f"source.path={bomb}", "source.text=[image_widths]", output, "workers=1")
    assert "has no valid sample (1 beyond a limit). First: a.parquet:0 and later" in line
    assert "row group 1: a row of up to 199,999,999 list entries (write smaller row groups) would take 11.9 GiB" in line
    assert peak < 1.5 * GIB


def test_a_file_that_lies_about_its_entries_is_stopped_by_the_kernel() -> None:
    with Budget(2**20).held(), pytest.raises(MemoryError):
        np.ones(2**31, np.uint8)
    assert len(np.ones(2**20, np.uint8)) == 2**20


@pytest.mark.wide
@pytest.mark.parametrize(
    ("frame", "count", "what"),
    [
        ({"text_tokens": 1}, 20_000_000, "20,000,000 rows with 0 list entries"),
        ({"text_tokens": 1, "audio_seconds": 86_400.0}, 20_000, "items of 20,000 samples"),
    ],
)
def test_rows_and_items_beyond_the_budget_are_one_line(
    frame: dict[str, float], count: int, what: str, tmp_path: Path
) -> None:
    pq.write_table(pa.table({key: np.full(count, value) for key, value in frame.items()}), tmp_path / "a.parquet")
    workload = TraceWorkload(path=str(tmp_path / "a.parquet"), on_overlong="truncate")
    with pytest.raises(ValueError, match=what + r".* would take .* GiB of memory, at most 2 "):
        workload.source(RULES)


@pytest.mark.parametrize(("given", "expected"), [("0.5", "0.5"), ("x", "must be GiB of memory, a number above 0")])
def test_the_budget_may_be_given(given: str, expected: str) -> None:
    code = "from entrain_bench_workloads.budget import BUDGET; print(BUDGET.num_bytes / 2**30)"
    environment = {**os.environ, "ENTRAIN_BENCH_MEMORY_GIB": given}
    done = run([executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert expected in done.stdout + done.stderr


def test_fewer_rows_of_a_large_trace_may_be_taken(tmp_path: Path) -> None:
    frame = pd.DataFrame({"text_tokens": np.ones(20_000_000, np.int8)})
    frame.to_parquet(tmp_path / "a.parquet", row_group_size=1_000_000)
    assert len(TraceWorkload(path=str(tmp_path / "a.parquet"), take="first:1000").source(RULES).shapes) == 1000


def gzipped(path: Path, members: Iterator[tuple[str, int]]) -> FileSource:
    """A compressed archive of members of zeros, none of which is ever whole in memory."""
    with gzip.open(path, "wb", compresslevel=9) as file:
        for name, size in members:
            info = tarfile.TarInfo(name)
            info.size = size
            file.write(info.tobuf())
            for _ in range(0, size, 2**24):
                file.write(bytes(2**24))
        file.write(bytes(1024))
    return FileSource(path=str(path))


def bad(source: FileSource, **limits: int) -> BadSampleError:
    records = list(samples_of(source, source.shards()[0], Limits(**limits)))
    (found,) = [sample for sample in records if isinstance(sample, BadSampleError)]
    return found


def test_a_member_of_an_archive_beyond_the_limit_is_not_unpacked(tmp_path: Path) -> None:
    source = gzipped(tmp_path / "a.tar.gz", iter([("a.jpg", 2**26)]))
    assert (tmp_path / "a.tar.gz").stat().st_size < 2**17
    assert "a.jpg: 67108864 bytes, limits.file_bytes=4194304" in str(bad(source, file_bytes=2**22))


def test_members_that_fit_are_refused_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "BUDGET", Budget(2**26))
    source = gzipped(tmp_path / "a.tar.gz", ((f"a.{number}.jpg", 2**24) for number in range(5)))
    assert "its members would take 0.1 GiB of memory" in str(bad(source))


def test_empty_members_count_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "BUDGET", Budget(2**20))
    write_tar(tmp_path / "a.tar", [(f"a.x{number}", b"") for number in range(2000)])
    assert "its members would take" in str(bad(FileSource(path=str(tmp_path / "a.tar"))))


@pytest.mark.parametrize("start", [b"[", b""])
def test_a_record_that_is_too_long_is_not_read(start: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert readers.MAX_RECORD_BYTES == 2**26
    monkeypatch.setattr(readers, "MAX_RECORD_BYTES", 2**16)
    (tmp_path / "a.json").write_bytes(start + b'{"text": "' + b"x" * 2**23 + b'"}\n')
    with pytest.raises(UserError, match=r"a.json: "):
        FileSource(path=str(tmp_path / "a.json"), text=["text"]).shards()
