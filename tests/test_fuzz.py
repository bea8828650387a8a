"""Random command lines and broken traces end with results or with one line, never in a traceback (``make fuzz``)."""

from __future__ import annotations

import io
import os
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from entrain_bench.base.errors import TRACEBACK_VARIABLE
from entrain_bench.cli import run_command
from entrain_bench.commands.help import verbs
from entrain_bench.config.comments import documented_keys
from entrain_bench.config.compose import compose
from entrain_bench.config.tree import choices
from entrain_bench.records.leaves import flatten

COUNT = int(os.environ.get("COUNT", "8"))
# 16 GPUs and a small batch: a run takes milliseconds.
SMALL = ("model=tiny", "cluster=a40x16", "global_batch=32", "microbatch_size=2", "layout.dp=2", "iterations=1")
GROUPS = ("strategy", "workload", "model", "cluster", "strategy/planner", "strategy/assigner", "strategy/scheduler")
# Where results go is not drawn; training takes seconds a run.
KEPT = ("results_dir", "mlflow", "mlflow_uri", "figure", "harness")
VALUES = (
    *("0", "1", "2", "3", "8", "-1", "0.5", "1e-9", "1e3", "1e6", "1e18", "1e308", "-1e308", "nan", "inf", "-inf"),
    *("null", "true", "false", "''", "' '", "abc", "[]", "[1]", "[nan]", "[[]]", "{}", "{a:1}", "[vision]", "???"),
    *("${seed}", "${nope}", "${", "range(0,3)", "choice(1,2)", "glob(*)", "0,1", "é", "a=b", "x" * 500, "../..", "/"),
    *("9223372036854775808", "1_000", "0x10", "2**3", "None", "~", "@", "\\", "'", "${oc.env:HOME}"),
)
# None of them lets a verb do its work.
WORDS = (
    *("--help", "--nope", "-x", "--config-dir=/nope", "--results-dir", "--help=seed", "--help=nope", "--retry", "-c"),
    *("results_dir=/dev/null/x", "results_dir=a,b", "tp=4", "retry=all", "port=-1", "within=x", "seconds=nan"),
    *("nothing", "chartqa", "'"),
)
FLAGS = ("--multirun", "-m", "--help", "--config-name=x", "--config-dir=/nope", "--version", "--", "verifi")
COLUMNS = ("sample_id", "n_images", "image_widths", "image_heights", "audio_seconds", "video_seconds", "text_tokens")
# What breaks by itself: unforeseen, or in a library.
BROKEN = re.compile(rf"Traceback|internal error|{TRACEBACK_VARIABLE}|\.pyx?:\d+ in ")
# Of a process's own time an example takes milliseconds to seconds, but a busy machine may let it wait for a minute: the
# suite's time limit of a test finds what hangs. Of 1000 examples it is none, so each has one.
DEADLINE_MS = None if COUNT < 100 else 60_000
fuzzed = settings(
    max_examples=COUNT, deadline=DEADLINE_MS, derandomize=COUNT < 100, suppress_health_check=[HealthCheck.too_slow]
)


@cache
def known_keys() -> dict[str, Any]:
    keys = {**dict.fromkeys(key.name for key in documented_keys()), **flatten(compose(*SMALL).content())}
    return {name: value for name, value in keys.items() if name.partition(".")[0] not in KEPT}


def values_like(value: Any) -> st.SearchStrategy[str]:
    """Values of the kind of another, so that a run comes further than its first check."""
    if isinstance(value, bool):
        return st.sampled_from(("true", "false"))
    if isinstance(value, int | float) and value:
        scaled = [str(type(value)(value * factor)) for factor in (0.01, 0.1, 0.5, 0.9, 1.1, 2, 3, 10, 100)]
        return st.sampled_from([*scaled, "0", "1", "2", "0.25" if isinstance(value, float) else "5", "64"])
    if isinstance(value, str):
        return st.sampled_from((value, "blocking", "overlapped", "truncate", "drop", "vision", "llm"))
    if isinstance(value, list | tuple):
        return st.sampled_from(("[]", "[vision]", "[llm]", "[vision,llm]", "[1]", "[1,2]", "null"))
    return st.sampled_from(("null", "0", "1", "2", "3", "4", "8", "16"))


@st.composite
def overrides(draw: st.DrawFn) -> str:
    prefix = draw(st.sampled_from(("",) * 12 + ("+", "++", "~", "@", " ")))
    if draw(st.integers(0, 3)) == 0:
        group = draw(st.sampled_from(GROUPS))
        return f"{prefix}{group}={draw(st.sampled_from((*choices(group), *VALUES)))}"
    key = draw(st.sampled_from([*known_keys()]))
    if draw(st.booleans()):
        return f"{key}={draw(values_like(known_keys()[key]))}"
    return f"{prefix}{key}{draw(st.sampled_from(('',) * 9 + ('x', '.', '@x')))}={draw(st.sampled_from(VALUES))}"


runs = st.tuples(st.lists(overrides(), min_size=1, max_size=3), st.sampled_from(("",) * 40 + FLAGS)).map(
    lambda drawn: [*SMALL, *filter(None, (*drawn[0], drawn[1]))]
)
verb_lines = st.builds(
    lambda verb, words: [verb, *words],
    st.sampled_from((*verbs(), "figure", "recomend")),
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=2),
)
CELLS: list[st.SearchStrategy[Any]] = [
    st.one_of(st.none(), cells)
    for cells in (st.sampled_from((0, 1, -1, 7, 2**62)), st.floats(), st.just("x"), st.just(b"x"), st.booleans())
]


@st.composite
def traces(draw: st.DrawFn) -> bytes:
    """The bytes of a Parquet file: columns of anything, sometimes damaged."""
    num_rows = draw(st.integers(0, 4))
    columns = {}
    for name in draw(st.sets(st.sampled_from(COLUMNS))):
        cells = draw(st.sampled_from(CELLS))
        cells = cells if draw(st.booleans()) else st.lists(cells, max_size=2)
        columns[name] = pa.array(draw(st.lists(cells, min_size=num_rows, max_size=num_rows)))
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    content = bytearray(file.getvalue())
    for place in draw(st.lists(st.integers(0, len(content) - 1), max_size=4)):
        content[place] = draw(st.integers(0, 255))
    return bytes(content[: draw(st.sampled_from((None,) * 9 + (len(content) // 2,)))])


def problem_of(words: list[str]) -> str:
    stderr = io.StringIO()
    with TemporaryDirectory() as folder, redirect_stdout(io.StringIO()), redirect_stderr(stderr):
        if words[0] == SMALL[0]:
            words = [*words, f"results_dir={folder}", "mlflow=false"]
        try:
            code: object = run_command(words)
        except SystemExit as end:
            code = end.code or 0
    lines = stderr.getvalue().splitlines()
    if broken := [line for line in lines if BROKEN.search(line)]:
        return broken[0]
    if code == 2 and not (len(lines) == 1 and lines[0].startswith("entrain-bench: ")):
        return f"exit code 2 and {lines}"
    return "" if code in (0, 1, 2) else f"exit code {code}"


@fuzzed
@given(st.one_of(runs, runs, runs, verb_lines))
def test_a_command_line_ends_with_results_or_one_line(words: list[str]) -> None:
    assert problem_of(words) == ""


@fuzzed
@given(traces())
def test_a_trace_ends_with_results_or_one_line(trace: bytes) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "fuzz.parquet"
        path.write_bytes(trace)
        assert problem_of([*SMALL, "workload=trace", f"workload.path={path}"]) == ""


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ("entrain-bench: seed=-1: must be in 0..2^32-1", ""),
        ("", "exit code 2 and []"),
        ("seed is wrong", "exit code 2 and ['seed is wrong']"),
        ("entrain-bench: internal error: x", "entrain-bench: internal error: x"),
    ],
)
def test_what_is_no_answer_to_bad_input_is_noticed(said: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> int:
        print(said, end="", file=sys.stderr)
        return 2

    monkeypatch.setattr("entrain_bench.commands.run.main", refuse)
    assert problem_of([*SMALL]) == problem
