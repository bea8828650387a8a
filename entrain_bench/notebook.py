"""Results in a notebook: runs, a single run and a timeline as HTML, as pandas and as a picture.

``from entrain_bench import notebook``; ``%load_ext entrain_bench.notebook`` also shows what ``run_experiment`` and
executors return. Nothing here changes a result or its key.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from entrain_bench.answers.answer import Answer
from entrain_bench.answers.console_table import Column, value_columns
from entrain_bench.answers.sentences import problems, sentences
from entrain_bench.answers.text import escape_markdown, markdown_table, seconds, to_html
from entrain_bench.base.errors import UserError
from entrain_bench.config.sources import add_config_dir
from entrain_bench.figures._lanes import gantt, slowest_replica
from entrain_bench.figures._pictures import draw_ranks, draw_standings, rank_table
from entrain_bench.figures._style import styled
from entrain_bench.program.table import timeline_frame
from entrain_bench.program.timeline import Timeline
from entrain_bench.records.metrics import RunResult
from entrain_bench.records.records import Record, Results
from entrain_bench.records.tables import table_of
from entrain_bench.run.cells import compose_cells, is_beside, run_cells

# Of a figure in a notebook.
DPI = 130


@dataclass(frozen=True, slots=True)
class View:
    """Results as notebooks show them: everything as a ``table``, a row a run, a metric or an action; and a picture."""

    table: pd.DataFrame
    html: str
    text: str
    draw: Callable[[], Figure]

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return self.html

    def to_pandas(self) -> pd.DataFrame:
        """Return everything as a table of its own."""
        return self.table.copy()

    def plot(self) -> Figure:
        """Return the picture as a new figure of matplotlib, which notebooks show.

        Raises:
            UserError: if there is nothing to draw.
        """
        with styled():
            figure = self.draw()
        figure.set_dpi(DPI)
        _let_notebooks_show_figures()
        return figure


def sweep(*overrides: str, config_dir: str | None = None, processes: int = 0) -> View:
    """Run what is missing of a sweep, as ``entrain-bench --multirun`` does, and return its runs.

    Args:
        *overrides: ``key=value``, several values separated by commas.
        config_dir: a folder of yours with further choices.
        processes: runs at a time, each in a process of its own; 0 runs one after the other in this process. A script
            that asks for processes needs ``if __name__ == "__main__"``.

    Raises:
        UserError: for bad overrides, and data that cannot be read.
    """
    add_config_dir(config_dir)
    cells = {cell.key: cell for cell in compose_cells(overrides, config_dir, multirun=True)}
    first = next(iter(cells.values())).config
    results = Results(Path(first.results_dir))
    results.prepare()
    wanted = (replace(cell, timeline=is_beside(cell.config, first)) for cell in cells.values())
    deque(run_cells(wanted, results, processes, retry_failed=first.retries_failed), maxlen=0)
    return show([record for key in cells if (record := results.read(key))])


def load(results_dir: str = "results") -> View:
    """Return all runs of a folder of results.

    Raises:
        UserError: for a folder without runs.
    """
    records = Results(Path(results_dir)).records()
    if not records:
        raise UserError(f"results_dir={results_dir}: holds no runs; run some, for example entrain-bench seed=0")
    return show(records)


def show(result: RunResult | Timeline | Sequence[Record]) -> View:
    """Return records, what ``run_experiment`` returns, or a timeline as notebooks show it."""
    if isinstance(result, RunResult):
        return _run(result)
    return _timeline(result) if isinstance(result, Timeline) else _runs(result)


def load_ipython_extension(shell: Any) -> None:
    """Let a notebook show what ``run_experiment`` and executors return (``%load_ext entrain_bench.notebook``)."""
    formatter = shell.display_formatter.formatters["text/html"]
    for kind in (RunResult, Timeline):
        formatter.for_type(kind, lambda result: show(result).html)


def _runs(records: Sequence[Record]) -> View:
    answer = Answer.of(records)
    rows = answer.results
    labels = answer.headings
    columns = [Column(label, [row.labels[label] for row in rows]) for label in labels]
    columns += value_columns(rows, answer.baseline) if rows else []
    lines = [*zip(*(column.cells for column in columns), strict=True)]
    words = [*sentences(answer), *problems(answer)]
    bold = [row.best for row in rows]
    heading = [column.heading for column in columns]
    return _view(table_of(records), words, heading, lines, len(labels), bold, lambda: draw_standings(answer))


def _run(result: RunResult) -> View:
    layout = ", ".join(f"{name} {text}" for name, text in result.layout.describe().items())
    rows = [(name, f"{value:.4g}") for name, value in result.metrics.items()]

    def draw() -> Figure:
        if result.timeline is None:
            raise UserError("timeline: was not kept, because the program is too large or keep_timeline is False")
        return draw_ranks(rank_table(result.timeline), None)

    words = [f"Layout: {layout}.", *result.remarks]
    heading = ["metric", "mean over iterations"]
    return _view(pd.DataFrame(result.iterations), words, heading, rows, 1, [False] * len(rows), draw)


def _timeline(result: Timeline) -> View:
    frame = timeline_frame(result)
    sides = {module.name: str(module.role) for module in result.program.model.modules}
    actions = frame.assign(side=frame["module"].map(sides))
    num_lanes = actions["lane"].nunique()
    text = f"{len(actions)} actions on {num_lanes} groups of ranks in {seconds(result.iteration_time_s)} s."

    def draw() -> Figure:
        return gantt({"": slowest_replica(actions)}, {"": "Slowest replica"}, {}, {"": ""})

    return View(frame, f"<p>{text}</p>", text, draw)


def _view(
    table: pd.DataFrame,
    words: Sequence[str],
    heading: Sequence[str],
    rows: Sequence[Sequence[str]],
    num_labels: int,
    bold: Sequence[bool],
    draw: Callable[[], Figure],
) -> View:
    """Paragraphs above a table, escaped; columns after the labels are flush right."""
    escaped = [[*map(escape_markdown, row)] for row in (heading, *rows)]
    cells = [[f"**{cell}**" if strong else cell for cell in row] for row, strong in zip(escaped[1:], bold, strict=True)]
    paragraphs = [*map(escape_markdown, words), markdown_table(escaped[0], cells, escaped[0][num_labels:])]
    return View(
        table,
        to_html("\n\n".join(paragraphs)),
        "\n".join([*words, *("  ".join(line) for line in (heading, *rows))]),
        draw,
    )


def _let_notebooks_show_figures() -> None:
    """Register figures with a running IPython, which otherwise knows those of pyplot only."""
    if "IPython" not in sys.modules:
        return
    from IPython import get_ipython
    from IPython.core.pylabtools import select_figure_formats

    if shell := get_ipython():
        select_figure_formats(shell, {"png"})
