"""Pictures of any runs in the forms of the figures: sorted dots with a heatmap, a heatmap, lines over a key."""

from io import BytesIO
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import LogNorm

from entrain_bench.answers.answer import Answer
from entrain_bench.answers.labels import FAMILY
from entrain_bench.answers.plots import FASTEST, LINES, NONE, Plot, plotted
from entrain_bench.figures import _style as style
from entrain_bench.figures._forms import COLUMN_IN, dots, handles, heatmap, lines, ranking
from entrain_bench.figures._style import Picture

SMALL_DPI = 130
# More columns are not readable; the CSV has them all.
MAX_COLUMNS = 16
DEFAULT = Plot()


def draw_runs(answer: Answer, plot: Plot = DEFAULT, axes: Axes | None = None) -> Picture:
    """Draw runs, into axes if there are any; the table has every name and column with its 95% CI over seeds.

    ``UserError`` for an unknown kind, metric, key or strategy.
    """
    data = plotted(answer, plot)
    if data.cells.empty:
        return style.empty_figure(data.caption)
    labels = {str(name): f"{row['label']}{'*' if row['lacks'] else ''}" for name, row in data.strategies.iterrows()}
    columns = [*data.cells["column"].unique()]
    values = data.cells.pivot(index="name", columns="column", values="value").loc[[*data.overall.index], columns]
    texts = values.map(plot.text)
    known: dict[str, dict[str, Any]] = {FASTEST: {}, NONE: {"cmap": style.GOOD}}
    shades = known.get(plot.over, {"norm": LogNorm(0.5, 2), "cmap": "vlag"})
    if plot.kind == LINES:
        figure, panel = _panel(axes, 2.4)
        colours = style.system_colours(data.strategies.rename_axis("strategy").reset_index())
        lines(panel, data.cells, "column", "value", "name", colours, labels)
        panel.set(xlabel=plot.by, ylabel=plot.label)
        panel.set_xticks(columns)
        panel.legend(handles=handles(colours, labels))
    elif plot.kind == "heatmap":
        figure, panel = _panel(axes, 0.6 + style.ROW_IN * len(values), wide=len(columns) * COLUMN_IN > 1)
        heatmap(panel, values.rename(index=labels), texts, **shades)
        panel.set_title(plot.label)
    else:
        colours = {str(name): style.FAMILY_COLOURS[family] for name, family in data.strategies[FAMILY].items()}
        means = data.overall.rename(columns={"value": "mean", "value_low": "low", "value_high": "high"})
        label = f"{plot.label}{', mean' if len(columns) > 1 else ''}"
        options: dict[str, Any] = {"start": 0.0 if plot.over == NONE else 1.0, "text": plot.text}
        if axes or not 1 < len(columns) <= MAX_COLUMNS:
            figure, panel = _panel(axes, 0.6 + style.ROW_IN * len(values))
            dots(panel, means, {name: labels[name] for name in means.index}, colours, label, **options)
        else:
            figure = ranking(means, values, texts, labels, colours, label, **options, **shades)
    return Picture(figure, data.cells, data.caption)


def standings_png(answer: Answer) -> bytes:
    """Return the times of an answer over the fastest's as a small PNG: the same bytes for the same data."""
    file = BytesIO()
    with style.styled():
        draw_runs(answer).figure.savefig(file, format="png", dpi=SMALL_DPI, metadata={"Software": None})
    return file.getvalue()


def _panel(axes: Axes | None, height_in: float, wide: bool = False) -> tuple[Any, Axes]:
    if axes:
        return axes.figure, axes
    width_in = style.DOUBLE_COLUMN_IN if wide else style.SINGLE_COLUMN_IN
    figure, (panel,) = style.panels(1, 1, width_in, height_in)
    return figure, panel
