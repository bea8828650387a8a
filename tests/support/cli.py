"""Small runs by command line."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from entrain_bench.cli import run_command
from entrain_bench.commands.help import takes, verbs
from entrain_bench.config.grammar import Request, read
from entrain_bench.config.line import split, verb_of

# 16 GPUs and a small batch: a run takes milliseconds.
SMALL = [
    "model=tiny",
    "cluster=a40x16",
    "global_batch=32",
    "microbatch_size=2",
    "layout.dp=2",
    "iterations=1",
    "mlflow=false",
]


def run(folder: Path, *overrides: str) -> int:
    return run_command([*SMALL, f"results_dir={folder}", *overrides])


def asked(line: str) -> tuple[str, Request[Any]]:
    """The verb of a command line, with or without its first word, and what it asks of the verb."""
    name, words = verb_of(split(shlex.split(line.removeprefix("entrain-bench "))), verbs())
    return name, read(words, name, takes(name))


def records(folder: Path) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in sorted((folder / "runs").rglob("*.json"))]
