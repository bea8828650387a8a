"""What is tried: command lines out of real keys, choices and values and of what people mistype; and broken traces."""

from __future__ import annotations

from functools import cache
from io import BytesIO
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from entrain_bench.commands.help import verbs
from entrain_bench.config.comments import documented_keys
from entrain_bench.config.compose import compose
from entrain_bench.config.tree import choices
from entrain_bench.records.leaves import flatten

# 16 GPUs and a small batch: a run takes milliseconds.
SMALL = ("model=tiny", "cluster=a40x16", "global_batch=32", "microbatch_size=2", "layout.dp=2", "iterations=1")
GROUPS = ("strategy", "workload", "model", "cluster", "strategy/planner", "strategy/assigner", "strategy/scheduler")
# Where results go is not the fuzzer's to choose; training takes seconds a run.
KEPT = ("results_dir", "mlflow", "mlflow_uri", "figure", "harness")
VALUES = (
    *("0", "1", "2", "3", "8", "-1", "0.5", "1e-9", "1e3", "1e6", "1e18", "1e308", "-1e308", "nan", "inf", "-inf"),
    *("null", "true", "false", "''", "' '", "abc", "[]", "[1]", "[nan]", "[[]]", "{}", "{a:1}", "[vision]", "???"),
    *("${seed}", "${nope}", "${", "range(0,3)", "choice(1,2)", "glob(*)", "0,1", "é", "a=b", "x" * 500, "../..", "/"),
    *("9223372036854775808", "1_000", "0x10", "2**3", "None", "~", "@", "\\", "'", "${oc.env:HOME}"),
)
PREFIXES = ("",) * 12 + ("+", "++", "~", "+", "@", " ")
# What numbers are multiplied by that stand for others a user might mean.
FACTORS = (0.01, 0.1, 0.5, 0.9, 1.1, 2, 3, 10, 100)
WHOLE = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 64)
NAMES = ("blocking", "overlapped", "truncate", "drop", "vision", "llm")
SHARES = (0, 0.1, 0.25, 0.5, 0.9, 1)
COMMANDS = (*verbs(), "figure", "recomend")
# None of them lets a verb do its work.
WORDS = (
    *("--help", "--nope", "-x", "--config-dir=/nope", "--results-dir", "--help=seed", "--help=nope", "--retry", "-c"),
    *("results_dir=/dev/null/x", "results_dir=a,b", "tp=4", "retry=all", "port=-1", "within=x", "seconds=nan"),
    *("nothing", "chartqa", "'"),
)
FLAGS = ("--multirun", "-m", "--help", "--config-name=x", "--config-dir=/nope", "--version", "--", "verifi")
COLUMNS = ("sample_id", "n_images", "image_widths", "image_heights", "audio_seconds", "video_seconds", "text_tokens")
CELLS: tuple[Any, ...] = (0, 1, -1, 7, 1.5, 1e308, -1e308, float("nan"), float("inf"), 2**62, None, "x", b"x", True)


def command_line(rng: np.random.Generator) -> tuple[str, ...]:
    """A command line."""
    if rng.random() < 0.1:
        return _pick(rng, COMMANDS), *(_pick(rng, WORDS) for _ in range(rng.integers(1, 3)))
    words = [_override(rng) for _ in range(rng.integers(1, 4))]
    if rng.random() < 0.15:
        words.insert(int(rng.integers(0, len(words) + 1)), _pick(rng, FLAGS))
    return *SMALL, *words


def trace(rng: np.random.Generator) -> bytes:
    """The bytes of a Parquet file: columns of anything, or those of a good one damaged."""
    rows = int(rng.integers(0, 5))
    columns = {name: _column(rng, rows) for name in COLUMNS if rng.random() < 0.6}
    if rng.random() < 0.3:
        columns = {"text_tokens": pa.array([100] * rows, pa.int32())}
    file = BytesIO()
    pq.write_table(pa.table(columns), file)
    content = bytearray(file.getvalue())
    if rng.random() < 0.4:
        for place in rng.integers(0, len(content), int(rng.integers(1, 9))):
            content[place] = int(rng.integers(0, 256))
    if rng.random() < 0.1:
        del content[int(rng.integers(0, len(content))) :]
    return bytes(content)


def _column(rng: np.random.Generator, rows: int) -> pa.Array:
    kind = CELLS[rng.integers(0, len(CELLS))]
    alike = [cell for cell in CELLS if type(cell) is type(kind) or cell is None]
    cells = [alike[rng.integers(0, len(alike))] for _ in range(rows)]
    lists = [[cells[index]] * int(rng.integers(0, 3)) for index in range(rows)]
    return pa.array(lists if rng.random() < 0.4 else cells)


def _override(rng: np.random.Generator) -> str:
    if rng.random() < 0.05:
        return _pick(rng, VALUES)
    if rng.random() < 0.25:
        group = _pick(rng, GROUPS)
        value = _pick(rng, choices(group)) if rng.random() < 0.7 else _pick(rng, VALUES)
        return f"{_pick(rng, PREFIXES)}{group}={value}"
    known = _keys()
    key = _pick(rng, [*known])
    if rng.random() < 0.5:
        return f"{key}={_like(rng, known[key])}"
    if rng.random() < 0.1:
        key = key[:-1] + _pick(rng, ("", "x", ".", ".x", "@x"))
    return f"{_pick(rng, PREFIXES)}{key}={_pick(rng, VALUES)}"


def _like(rng: np.random.Generator, value: Any) -> str:
    """A value of the kind of another, so that a run comes further than its first check."""
    if isinstance(value, bool):
        return _pick(rng, ("true", "false"))
    if isinstance(value, int | float) and value and rng.random() < 0.5:
        return str(type(value)(value * FACTORS[rng.integers(0, len(FACTORS))]))
    if isinstance(value, float):
        return str(SHARES[rng.integers(0, len(SHARES))])
    if isinstance(value, str):
        return _pick(rng, (value, *NAMES))
    if isinstance(value, list | tuple):
        return _pick(rng, ("[]", "[vision]", "[llm]", "[vision,llm]", "[1]", "[1,2]", "null"))
    return "null" if rng.random() < 0.1 else str(WHOLE[rng.integers(0, len(WHOLE))])


@cache
def _keys() -> dict[str, Any]:
    """Keys that may be overridden, with the values of ``SMALL``."""
    inside = flatten(compose(*SMALL).content())
    known = {**dict.fromkeys(key.name for key in documented_keys()), **inside}
    return {name: value for name, value in known.items() if name.partition(".")[0] not in KEPT}


def _pick(rng: np.random.Generator, among: tuple[str, ...] | list[str]) -> str:
    return among[rng.integers(0, len(among))]
