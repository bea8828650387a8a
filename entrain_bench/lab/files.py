"""JSON files, tables and figures that the lab leaves."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd

from entrain_bench.base.files import write_atomically
from entrain_bench.figures._runner import described, render
from entrain_bench.figures._style import Picture


def write_json(path: Path, value: Any, indent: int | None = 1) -> None:
    """Write a value that JSON can hold, None: on one line; a reader never sees half of it."""
    write_atomically(path, json.dumps(value, indent=indent).encode())


def read_json(path: Path) -> Any:
    """Return what a file holds, or None if there is no file or no JSON in it."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def write_outputs(
    results: Path,
    rows: pd.DataFrame,
    module: ModuleType,
    draw: Callable[[], Picture],
    command: str,
    setting: Mapping[str, Sequence[Any]],
    seeds: Sequence[int],
    costs: str,
) -> None:
    """Write ``<name>.csv`` and ``figures/<name>.{pdf,png,csv,json}``, as figures of runs have them, into results.

    The name is that of the module's package; the module's first line is the title.
    """
    name = module.__name__.split(".")[-2]
    title = (module.__doc__ or "").partition("\n")[0]
    write_atomically(results / f"{name}.csv", rows.to_csv(index=False).encode())
    described_as = {"json": described(title, command, setting, seeds, {"ranks of this machine": costs})}
    for suffix, content in (render(draw) | described_as).items():
        write_atomically(results / "figures" / f"{name}.{suffix}", content)
