"""Call a function on ranks of this machine that form a process group."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from entrain_bench.train.launching.launch import run_on_ranks
from entrain_bench.train.messages.control import process_group

TIMEOUT_S = 120.0


def on_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, device: str = "cpu", cores: Sequence[int] = ()
) -> list[Any]:
    """Call ``function(*args, group)`` on every rank and return the results by rank.

    The function is importable by name and returns values that JSON can hold; ``group`` is a gloo group of all ranks, on
    ``cuda`` too. Ranks are pinned to ``cores`` in turn, if there are any.

    Raises:
        UserError: if a rank rejects the input.
        ExecutionError: with the first cause, if a rank fails otherwise or dies.
    """
    job = partial(_call, function, args, device, tuple(cores))

    def read(work: Path) -> list[Any]:
        return [json.loads((work / f"result{rank}.json").read_text()) for rank in range(num_ranks)]

    return run_on_ranks(job, num_ranks, device, TIMEOUT_S, read)


def pin(cores: Sequence[int], index: int) -> None:
    """Keep this process, and threads that it starts later, on one of the cores, where the system supports it."""
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {cores[index % len(cores)]})


def _call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    device: str,
    cores: Sequence[int],
    work: Path,
    _: Callable[[int], None],
) -> None:
    rank = int(os.environ["RANK"])
    pin(cores, rank)
    with process_group(torch.device(device, rank) if device == "cuda" else torch.device("cpu"), TIMEOUT_S) as group:
        (work / f"result{rank}.json").write_text(json.dumps(function(*args, group)))
