"""Rows take the memory that they take, whatever a file says of them."""

from __future__ import annotations

import sys
from pathlib import Path
from subprocess import run
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from entrain_bench_workloads.dataset import parquet as parquet_module
from entrain_bench_workloads.dataset.fields import Fields
from entrain_bench_workloads.dataset.interface import Limits
from entrain_bench_workloads.dataset.parquet import ParquetSource
from entrain_bench_workloads.dataset.recent import Recent
from support.datasets import write_finevision

MIB = 2**20


# Arrow's memory at most while a file is scanned, at most while rows are read in any order too, and thereafter.
MEMORY = """
import sys, pyarrow
from entrain_bench_workloads.dataset.interface import Limits
from entrain_bench_workloads.dataset.parquet import ParquetSource
from entrain_bench_workloads.dataset.recent import Recent

pool, limits = pyarrow.default_memory_pool(), Limits()
source = ParquetSource(path=sys.argv[1], text=["texts"], images="images")
(shard,) = source.shards()
rows = sum(1 for _ in source.samples(shard, limits))
scanning = pool.max_memory()
reader = source.reader(source.files()[0], Recent(8, 2**27))
texts = [reader.record(row, limits).texts[-1] for row in (0, 150, 299, 100)]
print(rows, ",".join(texts), scanning, pool.max_memory(), pool.bytes_allocated(), sep=";")
"""


def written(path: Path, sizes: list[int], distinct: int = 10**9) -> ParquetSource:
    """Rows of an image of some bytes each, of which so many are distinct."""
    rng = np.random.default_rng(0)
    images = [rng.bytes(size) for size in sizes[:distinct]]
    rows = [([images[row % len(images)]], [f"text {row}"]) for row in range(len(sizes))]
    write_finevision(path, rows, row_group=len(rows))
    return ParquetSource(path=str(path), text=["texts"], images="images")


def pieces(source: ParquetSource) -> list[tuple[int, int]]:
    """Rows of each piece of the only row group, and their bytes."""
    with pq.ParquetFile(source.path, buffer_size=MIB, pre_buffer=False) as file:
        fields: Fields = source.fields()
        return [(len(piece), piece.nbytes) for piece in parquet_module._pieces(file, 0, fields.names)]


def test_images_that_repeat_take_no_more_memory_than_others(tmp_path: Path) -> None:
    """A file of 0.6 MB, whose rows are 60 MB."""
    source = written(tmp_path / "a.parquet", [200_000] * 300, distinct=3)
    assert (tmp_path / "a.parquet").stat().st_size < MIB
    done = run([sys.executable, "-c", MEMORY, source.path], capture_output=True, text=True, check=True, timeout=60)
    rows, texts, scanning, reading, kept = done.stdout.strip().split(";")
    assert (rows, texts) == ("300", "text 0,text 150,text 299,text 100")
    assert 2 * MIB < int(scanning) < 16 * MIB
    assert int(reading) < 48 * MIB
    assert 15 * MIB < int(kept) < 24 * MIB


def test_pieces_grow_with_small_rows_and_shrink_with_large_ones(tmp_path: Path) -> None:
    small = pieces(written(tmp_path / "a.parquet", [100] * 150))
    assert [rows for rows, _ in small] == [1, 2, 4, 8, 16, 32, 32, 32, 23]
    large = pieces(written(tmp_path / "b.parquet", [3 * MIB] * 4))
    assert [rows for rows, _ in large] == [1] * 4
    # 31 small rows, then large ones: a piece of 32 of these at most.
    mixed = pieces(written(tmp_path / "c.parquet", [100] * 31 + [MIB // 2] * 60))
    assert [rows for rows, _ in mixed][:6] == [1, 2, 4, 8, 16, 32]
    assert max(rows for rows, _ in mixed[6:]) == 7
    assert max(size for _, size in mixed[6:]) < 4 * MIB


def test_a_file_that_lies_about_its_size_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = written(tmp_path / "a.parquet", [100_000] * 100)

    class Lying:
        def __init__(self, metadata: pq.FileMetaData) -> None:
            self.num_row_groups = metadata.num_row_groups

        def row_group(self, _: int) -> Any:
            return type("Group", (), {"num_rows": 100, "total_byte_size": 1, "num_columns": 0})

    metadata = pq.ParquetFile.metadata
    monkeypatch.setattr(pq.ParquetFile, "metadata", property(lambda file: Lying(metadata.fget(file))))
    assert max(size for _, size in pieces(source)) < 4 * MIB


@pytest.mark.parametrize(("most_bytes", "is_kept"), [(1000, False), (100_000, True)])
def test_rows_are_kept_as_far_as_their_bytes_fit(most_bytes: int, is_kept: bool, tmp_path: Path) -> None:
    source, kept = written(tmp_path / "a.parquet", [100] * 100), Recent[Any](8, most_bytes)
    source.reader(source.files()[0], kept).record(0, Limits())
    assert (kept.find((tmp_path / "a.parquet", 0, source.fields().names)) is not None) == is_kept


def test_what_was_made_recently_is_kept_as_far_as_its_bytes_fit() -> None:
    kept: Recent[str] = Recent(3, 10)
    for key, size in (("a", 4), ("b", 4), ("c", 4)):
        kept.put(key, key, size)
    assert [kept.find(key) for key in "abc"] == [None, "b", "c"]
    kept.put("b", "again", 7)
    assert [kept.find(key) for key in "abc"] == [None, "again", None]
    kept.put("d", "too large", 11)
    assert kept.find("d") is None
    for key in "efgh":
        kept.put(key, key)
    assert [kept.find(key) for key in "efgh"] == [None, "f", "g", "h"]
