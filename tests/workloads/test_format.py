"""The trace format as it is documented: the table of columns is the schema, the examples run as written."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pandas as pd
import pytest

from entrain_bench.cli import run_command
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.specs.tokens import TokenRules
from entrain_bench_workloads.schema import COLUMNS
from entrain_bench_workloads.trace import PACKAGED_TRACES, TraceWorkload
from support.datasets import image_bytes, write_finevision, write_tar

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "workloads.md").read_text()
RULES = TokenRules(14, 2, 4, 2, 2.0, 50.0, 2, 30.0, 4.0)
JSONL = """
{"id": "q1", "prompt": "What is this?", "answer": "A cat.", "images": [{"width": 56, "height": 84}]}
{"id": "q2", "prompt": "Hello", "answer": "Hi", "images": []}
{"id": "q3", "prompt": "Same?", "answer": "No", "images": [{"width": 56, "height": 56}, {"width": 84, "height": 84}]}
"""


def sizes(shapes: SampleShapes) -> list[tuple[str, int, list[int]]]:
    """Name, text tokens and the items' LLM tokens of every sample."""
    rows = zip(shapes.item_offsets[:-1], shapes.item_offsets[1:], strict=True)
    items = [shapes.item_llm_tokens[low:high].tolist() for low, high in rows]
    return [(shapes.name_of(row), int(shapes.text_tokens[row]), each) for row, each in enumerate(items)]


def test_the_documented_columns_are_the_schema() -> None:
    table = DOCUMENT.partition("<!-- columns -->\n")[2].partition("<!-- end -->")[0]
    rows = [[cell.strip() for cell in line.split("|")] for line in table.splitlines()[2:]]
    found = {row[1].strip("`"): row[5] for row in rows}
    assert found == {name: column.allowed for name, column in COLUMNS.items()}


def test_packaged_traces_have_columns_of_the_schema_only() -> None:
    for path in PACKAGED_TRACES.glob("*.parquet"):
        assert {*pd.read_parquet(path).columns} <= {*COLUMNS}


@pytest.mark.wide
@pytest.mark.parametrize("page", ["README.md", "docs/workloads.md"])
def test_documented_commands_make_traces(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("shards").mkdir()
    picture = image_bytes(56, 84)
    write_finevision(Path("data/train-0.parquet"), [([picture], ["A caption"])])
    write_tar(Path("shards/a.tar"), [("0.txt", b"A caption"), ("0.jpg", picture)])
    commands = re.findall(r"^    entrain-bench (trace source.*)$", (ROOT / page).read_text(), re.MULTILINE)
    assert commands
    for command in commands:
        assert run_command([*shlex.split(command), "workers=1"]) == 0
        shapes = TraceWorkload(path="mine.parquet").source(RULES).shapes
        assert [(tokens, media) for _, tokens, media in sizes(shapes)] == [(3, [6])]


@pytest.mark.wide
def test_records_that_state_sizes_make_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("samples.jsonl").write_text(JSONL.strip())
    (options,) = re.findall(r"`(source=llava source.text=.*?)`", DOCUMENT)
    assert (
        run_command(["trace", *options.split(), "source.path=samples.jsonl", "output=mine.parquet", "workers=1"]) == 0
    )
    shapes = TraceWorkload(path="mine.parquet").source(RULES).shapes
    assert sizes(shapes) == [("samples.jsonl:0", 5, [6]), ("samples.jsonl:1", 2, []), ("samples.jsonl:2", 2, [4, 9])]
