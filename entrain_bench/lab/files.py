"""JSON files and figures that the lab leaves."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from entrain_bench.base.files import write_atomically
from entrain_bench.figures._runner import described, render


def write_json(path: Path, value: Any, indent: int | None = 1) -> None:
    """Write a value that JSON can hold, None: on one line; a reader never sees half of it."""
    write_atomically(path, json.dumps(value, indent=indent).encode())


def read_json(path: Path) -> Any:
    """Return what a file holds, or None if there is no file or no JSON in it."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def write_figure(
    stem: Path,
    module: ModuleType,
    draw: Callable[[], tuple[Figure, pd.DataFrame]],
    command: str,
    setting: Mapping[str, Sequence[Any]],
    seeds: Sequence[int],
    costs: str,
) -> None:
    """Write ``<stem>.{pdf,png,csv,json}`` as figures of runs have them; the module's first line is the title."""
    title, source = (module.__doc__ or "").partition("\n")[0], {"ranks of this machine": costs}
    for suffix, content in (render(draw) | {"json": described(title, command, setting, seeds, source)}).items():
        write_atomically(stem.with_name(f"{stem.name}.{suffix}"), content)
