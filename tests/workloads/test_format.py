"""The trace format as it is documented: the table of columns is the schema, the examples run as written."""

from __future__ import annotations

import io
import re
import tarfile
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image

from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.specs.tokens import TokenRules
from entrain_bench_workloads.schema import COLUMNS
from entrain_bench_workloads.trace import PACKAGED_TRACES, TraceWorkload

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "workloads.md").read_text()
RULES = TokenRules(14, 2, 4, 2, 2.0, 50.0, 2, 30.0, 4.0)
JSONL = """
{"id": "q1", "prompt": "What is this?", "answer": "A cat.", "images": [{"width": 56, "height": 84}]}
{"id": "q2", "prompt": "Hello", "answer": "Hi", "images": []}
{"id": "q3", "prompt": "Same?", "answer": "No", "images": [{"width": 56, "height": 56}, {"width": 84, "height": 84}]}
"""


def code_of(text: str, word: str) -> str:
    """The one Python example of a page with that word in it."""
    (found,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if word in block)
    return str(found)


def sizes(shapes: SampleShapes) -> list[tuple[str, int, list[int]]]:
    """Name, text tokens and the items' LLM tokens of every sample."""
    rows = zip(shapes.item_offsets[:-1], shapes.item_offsets[1:], strict=True)
    items = [shapes.item_llm_tokens[low:high].tolist() for low, high in rows]
    return [(shapes.name_of(row), int(shapes.text_tokens[row]), each) for row, each in enumerate(items)]


def test_the_table_of_columns_is_the_schema() -> None:
    table = DOCUMENT.partition("<!-- columns -->\n")[2].partition("<!-- end -->")[0]
    rows = [
        f"| `{name}` | {column.kind} | {column.unit} | {column.required} | {column.allowed} | {column.meaning} |"
        for name, column in COLUMNS.items()
    ]
    assert [re.sub(" +", " ", line) for line in table.splitlines()[2:]] == [re.sub(" +", " ", row) for row in rows]


def test_packaged_traces_have_columns_of_the_schema_only() -> None:
    for path in PACKAGED_TRACES.glob("*.parquet"):
        assert {*pd.read_parquet(path).columns} <= {*COLUMNS}


def test_the_readmes_example_makes_a_trace_of_jsonl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("samples.jsonl").write_text(JSONL.strip())
    example = code_of((ROOT / "README.md").read_text(), "pd.read_json")
    assert len(example.splitlines()) <= 10
    exec(compile(example, "README.md", "exec"), {})  # noqa: S102
    shapes = TraceWorkload(path="mine.parquet").source(RULES).shapes
    assert sizes(shapes) == [("q1", 5, [6]), ("q2", 2, []), ("q3", 2, [4, 9])]


def test_the_documents_example_makes_a_trace_of_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("shards").mkdir()
    picture = io.BytesIO()
    Image.new("RGB", (56, 84)).save(picture, "PNG")
    files = {
        "0.txt": b"A caption",
        "0.png": picture.getvalue(),
        "1.txt": "caf\N{LATIN SMALL LETTER E WITH ACUTE}".encode(),
    }
    with tarfile.open("shards/a.tar", "w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    exec(compile(code_of(DOCUMENT, "tarfile"), "workloads.md", "exec"), {})  # noqa: S102
    assert sizes(TraceWorkload(path="mine.parquet").source(RULES).shapes) == [("a/0", 3, [6]), ("a/1", 1, [])]
