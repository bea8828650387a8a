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
from matplotlib.patches import Patch

from entrain_bench.answers.answer import Answer
from entrain_bench.answers.console_table import Column, value_columns
from entrain_bench.answers.sentences import problems, sentences
from entrain_bench.answers.text import load_template, seconds
from entrain_bench.base.errors import UserError
from entrain_bench.config.sources import add_config_dir
from entrain_bench.figures import _ranks, _standings
from entrain_bench.figures._lanes import colours_of, draw_lanes, slowest_replica
from entrain_bench.figures._style import DOUBLE_COLUMN_IN, legend_above, panels, styled
from entrain_bench.program.table import timeline_frame
from entrain_bench.program.timeline import Timeline
from entrain_bench.records.records import Record, Results
from entrain_bench.records.run_result import RunResult
from entrain_bench.records.tables import table_of
from entrain_bench.run.cells import compose_cells, is_beside, run_cells

# Of a figure in a notebook.
DPI = 130
# Of a timeline: a lane, what stands around the lanes, and the legend.
LANE_IN = 0.16
MARGIN_IN = 0.8
LEGEND_COLUMNS = 5


@dataclass(frozen=True, slots=True)
class View:
    """Something found, as notebooks show it.

    Attributes:
        table: everything, a row a run, a metric or an action.
        html: what a notebook shows of it.
        text: the same in a terminal.
        draw: makes the picture.
    """

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
    if isinstance(result, Timeline):
        return _timeline(result)
    return _runs(result)


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
    heading = [column.heading for column in columns]
    lines = [*zip(*(column.cells for column in columns), strict=True)]
    told = [*sentences(answer), *problems(answer)]
    shown = [[{"text": cell, "strong": row.best} for cell in line] for line, row in zip(lines, rows, strict=True)]
    return View(
        table_of(records),
        _html(told, heading, shown, heading[len(labels) :]),
        "\n".join([*told, *("  ".join(line) for line in (heading, *lines))]),
        lambda: _standings.draw(answer),
    )


def _run(result: RunResult) -> View:
    layout = ", ".join(f"{name} {text}" for name, text in result.layout.describe().items())
    rows = [(name, f"{value:.4g}") for name, value in result.metrics.items()]
    words = [f"Layout: {layout}.", *result.remarks]
    heading = ["metric", "mean over iterations"]

    def draw() -> Figure:
        if result.timeline is None:
            raise UserError("timeline: was not kept, because the program is too large or keep_timeline is False")
        return _ranks.draw(_ranks.rank_table(result.timeline), None)

    text = "\n".join([*words, *("  ".join(row) for row in rows)])
    return View(pd.DataFrame(result.iterations), _html(words, heading, rows, heading[1:]), text, draw)


def _timeline(result: Timeline) -> View:
    frame = timeline_frame(result)
    sides = {module.name: str(module.role) for module in result.program.model.modules}
    actions = frame.assign(side=frame["module"].map(sides))
    num_lanes = actions["lane"].nunique()
    text = f"{len(actions)} actions on {num_lanes} groups of ranks in {seconds(result.iteration_time_s)} s."

    def draw() -> Figure:
        bars = slowest_replica(actions)
        colours = colours_of(bars)
        height_in = MARGIN_IN + LANE_IN * bars["lane"].nunique()
        figure, (panel,) = panels(1, 1, DOUBLE_COLUMN_IN, height_in)
        draw_lanes(panel, bars, colours, 1.01 * result.iteration_time_s)
        panel.set_xlabel("Time (s)")
        panel.set_title("Slowest replica", loc="left")
        legend_above(figure, [Patch(facecolor=colour, label=name) for name, colour in colours.items()], LEGEND_COLUMNS)
        return figure

    return View(frame, f"<p>{text}</p>", text, draw)


def _html(texts: Sequence[str], heading: Sequence[str], rows: Sequence[Sequence[Any]], right: Sequence[str]) -> str:
    """Paragraphs above a table, escaped; columns whose heading is in ``right`` are flush right."""
    blocks: Any = load_template("blocks.html").module
    return "".join([*map(blocks.paragraph, texts), blocks.table("Results", heading, rows, right)])


def _let_notebooks_show_figures() -> None:
    """Register figures with a running IPython, which otherwise knows those of pyplot only."""
    if "IPython" not in sys.modules:
        return
    from IPython import get_ipython
    from IPython.core.pylabtools import select_figure_formats

    if shell := get_ipython():
        select_figure_formats(shell, {"png"})
