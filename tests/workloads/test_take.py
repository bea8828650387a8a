"""How much of a source is taken, of a trace's rows and of a data set's files."""

from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

from entrain_bench.base.errors import UserError
from entrain_bench.specs.tokens import TokenRules
from entrain_bench_workloads.dataset.files import data_files
from entrain_bench_workloads.take import Take
from entrain_bench_workloads.trace import TraceWorkload

RULES = TokenRules(14, 2, 4, 2, 2.0, 50.0, 2, 30.0, 4.0)


@pytest.mark.parametrize(
    ("text", "of_ten", "of_three"),
    [
        ("all", 10, 3),
        ("first:4", 4, 3),
        ("first:100", 10, 3),
        ("first:50%", 5, 2),
        ("first:1%", 1, 1),
        ("first:100%", 10, 3),
    ],
)
def test_shares_and_numbers(text: str, of_ten: int, of_three: int) -> None:
    take = Take.parse(text, "take")
    assert (take.of(10), take.of(3), take.of(0)) == (of_ten, of_three, 0)


@pytest.mark.parametrize(
    "text", ["", "first", "first:0", "first:-1", "first:1.5", "first:101%", "first:0%", "last:3", "10%"]
)
def test_others_are_one_line(text: str) -> None:
    with pytest.raises(UserError, match=r"workload.take=.*must be"):
        Take.parse(text, "workload.take")


def test_a_trace_gives_its_first_rows_whatever_its_row_groups(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pd.DataFrame({"text_tokens": range(1, 11)}).to_parquet(path, row_group_size=3)
    assert pq.read_metadata(path).num_row_groups == 4
    for take, count in (("first:4", 4), ("first:60%", 6), ("all", 10)):
        shapes = TraceWorkload(path=str(path), take=take).source(RULES).shapes
        assert shapes.text_tokens.tolist() == list(range(1, count + 1))


def test_files_are_taken_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b/2.parquet", "a/1.parquet", "c.parquet", "a/x.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    found = data_files(str(tmp_path), (".parquet",), Take.parse("first:2", "take"))
    assert [file.label for file in found] == ["a/1.parquet", "b/2.parquet"]
    everything = data_files(str(tmp_path / "**" / "*.parquet"), (".parquet",), Take())
    assert [file.label for file in everything] == ["a/1.parquet", "b/2.parquet", "c.parquet"]
    with pytest.raises(UserError, match=r"source.path=.*has no .tar files"):
        data_files(str(tmp_path), (".tar",), Take())
