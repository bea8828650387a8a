"""Iteration time of every strategy on every job, relative to the fastest strategy of the job.

Cells of ``experiments/figure/iteration_time.yaml``; corresponds to Figure 11 of arXiv:2605.27918. A dot is a job, mean
over seeds; a diamond is the geometric mean over all jobs with its 95% interval over seeds. Below them stand strategies
without a result on some job. The CSV has seconds, intervals and, if posterior runs are there (``entrain-bench figures
posterior``), P(fastest).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from entrain_bench.answers import tables
from entrain_bench.answers.labels import OURS, cluster_label, families, names
from entrain_bench.answers.posterior import chances_by_job
from entrain_bench.answers.sentences import posterior_sentences
from entrain_bench.figures import _style as style

EXPERIMENT = "iteration_time"
RUNS = True
# ``draw`` also takes the posterior runs of its jobs.
DRAWS = True
load = tables.run_table
ROW_IN = 0.14
HEAD_IN = 0.85
# Where the axis ends; times beyond stand at its end.
FARTHEST = 4.0
TICKS = [1.0, 1.2, 1.5, 2.0, 3.0, FARTHEST]


def draw(data: pd.DataFrame, drawn: pd.DataFrame | None = None) -> style.Picture:
    """A row a strategy, a dot a job; ``drawn`` are the runs under posterior draws."""
    # Columns of runs without a result are absent.
    data = data.reindex(columns=data.columns.union(tables.TIMES, sort=False))
    labels = names(data, "strategy")
    table = tables.summarise(data).merge(data[[*tables.JOB, "cluster"]].drop_duplicates(tables.JOB), on=tables.JOB)
    overall = tables.time_over_fastest(data)
    shown = table.assign(relative=table["behind"].where(table["verdict"] != "fastest", 1.0)).dropna(subset="relative")
    shown = shown.astype({"relative": float})
    some = shown.groupby("strategy")["relative"].agg(["count", "mean"])
    some = some.drop(overall.index, errors="ignore").sort_values(["count", "mean"], ascending=[False, True])
    order = [*overall.index, *some.index, *(name for name in labels if name not in {*overall.index, *some.index})]
    height_in = min(style.MAX_HEIGHT_IN, HEAD_IN + ROW_IN * len(order))
    figure, (panel,) = style.panels(1, 1, style.DOUBLE_COLUMN_IN, height_in)
    if shown.empty:
        style.show_reason(panel, "no strategy has a result")
    else:
        _dots(figure, panel, shown, order, {name: families(data)[name] == OURS for name in order}, labels)
        counts = some["count"].map(f"{{}} of {len(data[tables.JOB].drop_duplicates())} jobs".format)
        _means(panel, overall, order, {str(name): text for name, text in counts.items()})
    odds = chances_by_job(drawn) if drawn is not None else {}
    if odds:
        found = [odds.get((row["model"], row["workload"]), {}).get(row["strategy"]) for _, row in table.iterrows()]
        leads = [chance.lead if chance else None for chance in found]
        table["p_fastest"] = [chance.probability if chance else None for chance in found]
        table["lead_low"] = [lead.low if lead else None for lead in leads]
        table["lead_high"] = [lead.high if lead else None for lead in leads]
    ours = [name for name, family in families(data).items() if family == OURS]
    said = [_message(data, overall, labels) + tables.lacking(table, labels)]
    return style.Picture(figure, table, " ".join([*said, *posterior_sentences([*odds.values()], labels, ours)]))


def _dots(
    figure: Figure,
    panel: Axes,
    shown: pd.DataFrame,
    order: list[str],
    own: Mapping[str, bool],
    labels: Mapping[str, str],
) -> None:
    """The jobs of every strategy; colours are models in the order of the jobs, markers are clusters."""
    models = names(shown.sort_values("model", key=lambda column: column.map(_size), kind="stable"), "model")
    clusters = {str(name): cluster_label(str(name)) for name in shown["cluster"].unique()}
    places = {name: place + 0.5 for place, name in enumerate(order)}
    rows = shown.assign(
        place=shown["strategy"].map(places),
        relative=shown["relative"].clip(upper=FARTHEST),
        LLM=shown["model"].map(models),
        GPUs=shown["cluster"].map(clusters),
    )
    colours = dict(zip(models.values(), sns.color_palette("viridis_r", len(models) + 1)[1:], strict=True))
    markers = style.marker_of(clusters.values())
    look: dict[str, Any] = {"hue_order": [*colours], "palette": colours, "style_order": [*markers], "markers": markers}
    sns.scatterplot(
        rows,
        x="relative",
        y="place",
        hue="LLM",
        style="GPUs",
        s=16,
        alpha=0.8,
        linewidth=0.2,
        legend=False,
        ax=panel,
        **look,
    )
    handles = [Line2D([], [], ls="", marker="o", color=colour, label=name) for name, colour in colours.items()]
    grey: dict[str, Any] = {"ls": "", "color": style.FAINT}
    handles += [Line2D([], [], marker=markers[name], label=name, **grey) for name in markers if len(markers) > 1]
    style.legend_above(figure, handles if len(shown[tables.JOB].drop_duplicates()) > 1 else [])
    panel.set(
        xscale="log", xlim=(0.97, FARTHEST * 1.22), ylim=(len(order), 0), xlabel="time / fastest of the job", ylabel=""
    )
    panel.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS[:-1]] + [f"≥ {FARTHEST:g}"])
    panel.minorticks_off()
    panel.set_yticks([*places.values()], [labels[name] for name in order])
    for name, label in zip(order, panel.get_yticklabels(), strict=True):
        label.set_color(style.FAMILY_COLOURS[OURS] if own[name] else style.INK)
    panel.tick_params(axis="y", length=0)
    panel.grid(axis="both")
    panel.set_axisbelow(True)


def _means(panel: Axes, overall: pd.DataFrame, order: list[str], counts: Mapping[str, str]) -> None:
    """The geometric mean of every strategy with a result on all jobs; of the others the number of their jobs."""
    means = overall[["mean", "low", "high"]].clip(upper=FARTHEST)
    places = np.arange(len(means)) + 0.5
    panel.hlines(places, means["low"], means["high"], color=style.INK, linewidth=0.8)
    panel.scatter(
        means["mean"], places, marker="D", s=15, facecolor="white", edgecolor=style.INK, linewidth=0.8, zorder=4
    )
    texts = {**overall["mean"].map("{:.2f}".format), **counts}
    for place, name in enumerate(order):
        panel.text(FARTHEST * 1.2, place + 0.5, texts.get(name, "no result"), ha="right", va="center")


def _size(model: str) -> float:
    """Billions of weights as a model's name states them; 0 if it states none."""
    words = model.lower().replace("-", "_").split("_")
    sizes = [float(word[:-1]) for word in words if word.endswith("b") and word[:-1].replace(".", "", 1).isdigit()]
    return max(sizes, default=0.0)


def _message(data: pd.DataFrame, overall: pd.DataFrame, labels: Mapping[str, str]) -> str:
    winners = [next(iter(comparison.best), "") for comparison in tables.compared(data, tables.JOB).values()]
    often = sorted({*winners} - {""}, key=lambda name: -winners.count(name))
    said = ", ".join(f"{labels[name]} in {winners.count(name)}" for name in often) or "none is decided"
    first = f"Fastest of {len(winners)} job{'s' if len(winners) > 1 else ''}: {said}."
    if len(overall) < 2:
        return first
    second = overall.iloc[1]
    return f"{first} Over all jobs, {labels[str(second.name)]} is the runner-up with {second['mean']:.2f}x the time."
