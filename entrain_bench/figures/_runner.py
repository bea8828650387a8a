"""Bring figures up to date: run what they miss, load, draw, write."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from io import BytesIO
from time import perf_counter
from typing import Any, Protocol, cast

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

import entrain_bench.figures as package
from entrain_bench.cli import EXIT_FAILED, TRACEBACK_VARIABLE
from entrain_bench.config.command_line import Cell
from entrain_bench.errors import UserError
from entrain_bench.figures._style import STYLE, empty_figure
from entrain_bench.records.records import Results, write_atomically
from entrain_bench.sweeps import Sweeps


class FigureModule(Protocol):
    """A module that draws a figure; the package's docstring says what its members mean."""

    EXPERIMENT: str
    RUNS: bool

    def load(self, cells: Sequence[Cell], results: Results) -> Any:
        """The tidy data of the cells; raises ``UserError`` if there is none."""
        ...

    def draw(self, data: Any) -> tuple[Figure, pd.DataFrame]:
        """The figure and the table of what it shows."""
        ...


def draw_figures(names: Sequence[str], results_dir: str) -> int:
    """Bring the figures up to date one by one; one without data says so and does not keep others from theirs.

    Returns:
        0, or 1 if anything is missing.
    """
    sweeps = Sweeps(results_dir)
    sweeps.results.check_writable()
    code = 0
    for place, name in enumerate(names, start=1):
        started = perf_counter()
        module = cast(FigureModule, importlib.import_module(f"{package.__name__}.{name}"))
        problem = draw_figure(name, module, sweeps)
        code = EXIT_FAILED if problem else code
        where = sweeps.results.root / "figures" / f"{name}.{{pdf,png,csv}}"
        note = f"incomplete: {problem}; " if problem else ""
        print(
            f"[{place}/{len(names)}] {name}: {note}{where} ({perf_counter() - started:.1f} s)",
            file=sys.stderr,
            flush=True,
        )
    return code


def draw_figure(name: str, module: FigureModule, sweeps: Sweeps) -> str:
    """Draw and write one figure; returns what is missing from it, if anything."""
    problem = ""
    try:
        cells = sweeps.cells(f"figure={module.EXPERIMENT}")
        if module.RUNS:
            problem = sweeps.run(f"figure={module.EXPERIMENT}")
        data = module.load(cells, sweeps.results)
        files = render(lambda: module.draw(data))
    except Exception as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            traceback.print_exc()
        internal = "" if isinstance(error, UserError) else f"internal error: {type(error).__name__}: "
        problem = reason = internal + " ".join(str(error).split())
        files = render(lambda: empty_figure(reason))
    for suffix, content in files.items():
        write_atomically(sweeps.results.root / "figures" / f"{name}.{suffix}", content)
    return problem


def render(draw: Callable[[], tuple[Figure, pd.DataFrame]]) -> dict[str, bytes]:
    """The files of a figure by suffix; the same data gives the same bytes."""
    with mpl.rc_context(STYLE):
        figure, table = draw()
        pdf, png = BytesIO(), BytesIO()
        figure.savefig(png, format="png")
        figure.set_layout_engine("none")  # keeps the layout just made
        figure.savefig(pdf, format="pdf", metadata={"CreationDate": None})
    csv = table.to_csv(index=False, float_format="%.6g", lineterminator="\n").encode()
    return {"pdf": pdf.getvalue(), "png": png.getvalue(), "csv": csv}
