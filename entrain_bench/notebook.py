"""Results in a notebook: runs, a single run and a timeline as HTML, as pandas and as a picture.

Nothing here changes a result or its key.
"""

import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from entrain_bench.answers.answer import Answer
from entrain_bench.answers.comparison import TIME
from entrain_bench.answers.console_table import Column, value_columns
from entrain_bench.answers.plots import Plot
from entrain_bench.answers.recommend.asking import Asked, Keys, Say
from entrain_bench.answers.recommend.engines import READERS
from entrain_bench.answers.recommend.lines import answer_lines
from entrain_bench.answers.recommend.recommendation import Reply
from entrain_bench.answers.sentences import problems, sentences
from entrain_bench.answers.text import TIME_WORDS, seconds
from entrain_bench.answers.timelines import slowest_replica
from entrain_bench.base.errors import UserError, no_runs, unknown_choice
from entrain_bench.config.compose import Composer
from entrain_bench.config.given import with_data
from entrain_bench.config.sources import add_config_dir
from entrain_bench.figures._lanes import gantt
from entrain_bench.figures._plot import draw_runs
from entrain_bench.figures._style import DOUBLE_COLUMN_IN, panels, styled
from entrain_bench.program.table import timeline_frame
from entrain_bench.program.timeline import Timeline
from entrain_bench.records.metrics import RunResult
from entrain_bench.records.records import Record, Results
from entrain_bench.records.tables import table_of
from entrain_bench.run.cells import compose_cells, is_beside, run_cells

# Resolution of a figure in a notebook, and letters of a line of text.
DPI = 130
WIDTH = 120


@dataclass(frozen=True, slots=True)
class View:
    """Results as notebooks show them: a ``table`` with one row per run, metric or action, and a picture.

    ``records`` are those of several runs, whose picture can be chosen.
    """

    table: pd.DataFrame
    html: str
    text: str
    draw: Callable[[], Figure]
    records: Sequence[Record] = ()

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return self.html

    def to_pandas(self) -> pd.DataFrame:
        """Return everything as a table of its own."""
        return self.table.copy()

    def plot(
        self,
        kind: str = "dots",
        *,
        metric: str = TIME,
        by: str = "",
        strategies: Sequence[str] = (),
        normalize: str = "",
        ax: Axes | None = None,
    ) -> Figure:
        """Return the picture as a new figure of matplotlib, which notebooks show, or draw it into axes.

        Of several runs ``entrain-bench plot`` takes the same arguments: dots, heatmap or lines of a metric, by case or
        by a key, over the fastest run (``normalize="fastest"``), a strategy, or ``none``. ``UserError`` for others, and
        for arguments where there is one run only.
        """
        plot = Plot(kind, metric, by, normalize)
        with styled():
            if self.records:
                figure = draw_runs(Answer.of(_of_strategies(self.records, strategies)), plot, ax).figure
            elif plot != Plot() or strategies or ax:
                raise UserError("plot: takes arguments for several runs only. Call plot() without any")
            else:
                figure = self.draw()
        if ax is None:
            figure.set_dpi(DPI)
            _let_notebooks_show_figures()
        return figure


def _of_strategies(records: Sequence[Record], strategies: Sequence[str]) -> Sequence[Record]:
    known = {str(record.labels["strategy"]) for record in records}
    for name in strategies:
        if name not in known:
            raise unknown_choice("strategies", name, sorted(known))
    return [record for record in records if not strategies or record.labels["strategy"] in strategies]


def sweep(*overrides: str, config_dir: str | None = None, processes: int = 0) -> View:
    """Run the missing runs of a sweep, as ``entrain-bench --multirun`` does, and return its runs.

    ``processes`` run at a time; 0: one run after the other in this process. A script that asks for processes needs
    ``if __name__ == "__main__"``. ``UserError`` for bad overrides, and data that cannot be read.
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
    """Return all runs of a folder of results; ``UserError`` for a folder without runs."""
    records = Results(Path(results_dir)).records()
    if not records:
        raise no_runs(results_dir)
    return show(records)


def plot(results_dir: str = "results", kind: str = "dots", **options: Any) -> Figure:
    """Draw the runs of a folder of results (``View.plot``); ``UserError`` for a folder without runs."""
    return load(results_dir).plot(kind, **options)


@dataclass(frozen=True, slots=True)
class Advice:
    """How to train a job fastest, for three readers; None for a reader for whom nothing runs the job.

    Attributes:
        framework: in a framework, unmodified.
        loop: with a balanced sampler in your training loop.
        suite: with this suite's runtime.
        text: the answer as the terminal shows it.
    """

    framework: Reply | None
    loop: Reply | None
    suite: Reply | None
    text: str

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.text)}</pre>"


def recommend(
    *overrides: str,
    within: str | None = None,
    measured_s: float | None = None,
    seconds: float | None = None,
    output: str | None = None,
    config_dir: str | None = None,
    processes: int = 0,
    say: Say = lambda _: None,
) -> Advice:
    """Answer how to train a job fastest, as ``entrain-bench recommend`` does, and write the plans.

    Keywords are keys of the command; ``processes`` is that of ``sweep``, and ``say=print`` shows how far it is.
    ``UserError`` for bad input, and if no strategy has a result.
    """
    add_config_dir(config_dir)
    composer = Composer(config_dir)
    asked = Asked.of(composer, with_data(overrides), Keys(within, measured_s, seconds, output))
    results = Results(Path(asked.config.results_dir))
    results.prepare()
    found = asked.answered(composer, results, processes, say)
    if found.answer is None:
        raise UserError(found.reasons[0])
    replies = found.replies(found.files(), config_dir)
    lines = answer_lines(found.answer, replies, asked.omitted, WIDTH)
    return Advice(**{reader: replies.get(reader) for reader in READERS}, text="\n".join(lines))


def show(result: RunResult | Timeline | Sequence[Record]) -> View:
    """Return records, a result of ``run_experiment``, or a timeline as notebooks show it."""
    if isinstance(result, RunResult):
        return _run(result)
    return _timeline(result) if isinstance(result, Timeline) else _runs(result)


def _runs(records: Sequence[Record]) -> View:
    answer = Answer.of(records)
    rows = answer.results
    columns = [Column(label, [row.labels[label] for row in rows]) for label in answer.headings]
    columns += value_columns(rows, answer.baseline) if rows else []
    shown = pd.DataFrame(dict(enumerate(column.cells for column in columns)))
    shown = shown.set_axis([column.heading for column in columns], axis="columns")
    words = [*sentences(answer), *problems(answer)]
    view = _view(table_of(answer.records), words, shown, [row.best for row in rows], lambda: draw_runs(answer).figure)
    return replace(view, records=records)


def _run(result: RunResult) -> View:
    layout = ", ".join(f"{name} {text}" for name, text in result.layout.describe().items())
    rows = [(name, f"{value:.4g}") for name, value in result.metrics.items()]

    def draw() -> Figure:
        shares = {TIME_WORDS[name]: result.metrics[name] for name in TIME_WORDS if result.metrics.get(name)}
        figure, (panel,) = panels(1, 1, DOUBLE_COLUMN_IN, 2.0)
        panel.barh([*shares], [*shares.values()])
        panel.invert_yaxis()
        panel.set_xlabel("share of GPU time")
        return figure

    shown = pd.DataFrame(rows, columns=["metric", "mean over iterations"])
    words = [f"Layout: {layout}.", *result.remarks]
    return _view(pd.DataFrame(result.iterations), words, shown, [False] * len(rows), draw)


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
    table: pd.DataFrame, words: Sequence[str], shown: pd.DataFrame, bold: Sequence[bool], draw: Callable[[], Figure]
) -> View:
    cells = shown.map(escape)
    strong = cells.where(~pd.Series(bold, dtype=bool), "<strong>" + cells + "</strong>", axis="index")
    paragraphs = [f"<p>{escape(line)}</p>" for line in words]
    html = "\n".join([*paragraphs, strong.to_html(index=False, border=0, escape=False)])
    return View(table, html, "\n".join([*words, shown.to_string(index=False)]), draw)


def _let_notebooks_show_figures() -> None:
    """Register figures with a running IPython, which otherwise knows those of pyplot only."""
    if "IPython" not in sys.modules:
        return
    from IPython import get_ipython
    from IPython.core.pylabtools import select_figure_formats

    if shell := get_ipython():
        select_figure_formats(shell, {"png"})
