"""Rows of the ledger: what the committed tables hold, and what a wrong table is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrain_bench.base.errors import UserError
from entrain_bench.lab.ledger.jobs import load_book
from entrain_bench.lab.ledger.rows import read_rows


def table(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.csv"
    path.write_text(text)
    return path


def test_every_committed_row_is_read() -> None:
    tables = [read_rows(path) for path in load_book().tables]
    assert sum(map(len, tables)) == 4601
    for rows in tables:
        assert all(row.model and row.outcome for row in rows)
        assert len({row.line for row in rows}) == len(rows)


def test_a_time_is_what_is_printed_or_follows_from_a_throughput(tmp_path: Path) -> None:
    rows = read_rows(
        table(
            tmp_path,
            "seq_len,gpus,global_batch,step_time_s,samples_per_s,tokens_per_s_per_gpu,tokens_per_s_total,outcome\n"
            "1000,8,16,4.5,,,,ok\n1000,8,16,,8,,,ok\n1000,8,16,,,500,,ok\n1000,8,16,,,,8000,ok\n"
            "<= 1000,8,16,,,500,,ok\n1000,8,,,8,,,oom\n",
        )
    )
    assert [row.published_s for row in rows] == [4.5, 2.0, 4.0, 2.0, None, None]
    assert [row.seq_at_most for row in rows] == [False] * 4 + [True, False]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layer,outcome\n1,ok\n", "mine.csv:1: column=layer"),
        ("layers,outcome\n1,ok\n1.5,ok\n", "mine.csv:3: layers=1.5: must be a positive integer or empty"),
        ("step_time_s,outcome\nfast,ok\n", "mine.csv:2: step_time_s=fast: must be a positive number or empty"),
        ("step_time_s,outcome\n-1,ok\n", "mine.csv:2: step_time_s=-1: must be a positive number"),
        ("step_time_s,outcome\ninf,ok\n", "mine.csv:2: step_time_s=inf: must be a positive number"),
        ("sequence_parallel,outcome\nmaybe,ok\n", "mine.csv:2: sequence_parallel=maybe: must be true, false or empty"),
        ("layers,outcome\n1,fine\n", "mine.csv:2: outcome=fine"),
        ("layers,outcome\n1\n", "mine.csv:2: must have 2 fields"),
        ("layers,outcome\n1,ok,3\n", "mine.csv:2: must have 2 fields"),
        ("", "mine.csv: must have a header"),
    ],
)
def test_a_wrong_table_is_told_line_and_field(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        read_rows(table(tmp_path, text))
    assert str(error.value).startswith(message)


def test_a_line_is_that_of_the_file_even_behind_a_field_of_two_lines(tmp_path: Path) -> None:
    rows = read_rows(table(tmp_path, 'note,outcome\n"one\ntwo",ok\nthree,ok\n'))
    assert [(row.line, row.note) for row in rows] == [(2, "one\ntwo"), (4, "three")]


def test_a_missing_file_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="must be a CSV file that can be read"):
        read_rows(tmp_path / "none.csv")
