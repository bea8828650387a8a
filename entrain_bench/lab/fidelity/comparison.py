"""Predicted against measured: programs, pairs of strategies, their errors and a figure, of rows of ``fidelity.csv``."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from scipy.stats import kendalltau, ttest_rel

from entrain_bench.answers.statistics import LEVEL, ratio_interval
from entrain_bench.figures import _style as style
from entrain_bench.figures._style import FAINT, GRID, INK, Colour, marker_of
from entrain_bench.lab.fidelity.programs import SPLIT, STRATEGIES

# Targets of median errors.
TARGET_ITERATION = 0.10
TARGET_SPEEDUP = 0.05
TITLE = "Predicted against measured: iteration times, speedups between strategies, and errors by quantity."
MISSED = "#d55e00"
QUANTITIES = {
    "iteration_error": "Iteration",
    "core_error": "Without steps",
    "replay_error": "Order, messages",
    "action_bias": "One pass",
    "bubble_error": "Bubble (points)",
    "memory_error": "Memory",
}
GROUP = ["num_ranks", "workload", "seed"]


def pair_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """One row a pair of strategies of a group: how much faster the second is, measured and predicted.

    The measured one has its 95% interval, ``low`` to ``high``, and the chance to measure as much where nothing is
    gained. ``sign_error``: the interval excludes 1, and the prediction is on the other side.
    """
    pairs = []
    for group, members in rows.groupby(GROUP, sort=False):
        for one, other in combinations(members.to_dict("records"), 2):
            # Repetition by repetition, for strategies took turns.
            times = [json.loads(str(row["repetitions_s"])) for row in (one, other)]
            measured = ratio_interval(*times)
            predicted = one["predicted_s"] / other["predicted_s"]
            names = dict(zip(GROUP, group, strict=True)) | {"slow": one["strategy"], "fast": other["strategy"]}
            ends = {"measured_speedup": measured.mean, "low": measured.low, "high": measured.high}
            error = {"predicted_speedup": predicted, "error": predicted / measured.mean - 1.0}
            wrong = measured.excludes(1.0) and (measured.mean - 1.0) * (predicted - 1.0) < 0
            pairs.append({**names, **ends, "chance": ttest_rel(*np.log(times)).pvalue, **error, "sign_error": wrong})
    return pd.DataFrame(pairs)


def rank_correlations(rows: pd.DataFrame) -> pd.Series:
    """Kendall's tau of measured and predicted iteration times over the strategies of each group."""
    groups = rows.groupby(GROUP, sort=False)
    return pd.Series(
        {name: kendalltau(members["measured_s"], members["predicted_s"]).statistic for name, members in groups}
    )


def summary(rows: pd.DataFrame, pairs: pd.DataFrame) -> dict[str, float]:
    """Return the numbers with targets, and further numbers.

    Of many pairs without any difference, intervals of one in twenty exclude 1. ``sure_sign_errors`` are those of
    differences that are significant for all pairs together (Bonferroni).
    """
    names = ("iteration_error", "core_error", "replay_error", "action_error", "repeat_error", "memory_error")
    # A file of an earlier version has no ``repeat_error``.
    errors = {name: float(rows[name].abs().median()) for name in names if name in rows}
    return {
        "num_programs": float(len(rows)),
        **errors,
        "bubble_error": float((rows["predicted_bubble"] - rows["measured_bubble"]).abs().median()),
        "speedup_error": float(pairs["error"].abs().median()),
        "sign_errors": float(pairs["sign_error"].sum()),
        "sure_sign_errors": float((pairs["sign_error"] & (pairs["chance"] < LEVEL / len(pairs))).sum()),
        "num_pairs": float(len(pairs)),
        "kendall_tau": float(rank_correlations(rows).mean()),
        "noise": float(rows["noise"].median()),
    }


def draw(rows: pd.DataFrame, pairs: pd.DataFrame) -> style.Picture:
    """Left: a mark a program. Middle: a mark a pair of strategies. Right: a mark a program and quantity."""
    # In the order in which other figures show them.
    colours = style.strategy_colours({name: place for place, name in enumerate((*STRATEGIES, *SPLIT))})
    markers = marker_of(rows["num_ranks"].unique())
    figure, (times, gains, errors) = style.panels(1, 3, style.DOUBLE_COLUMN_IN, 3.0)
    _draw_times(times, rows, colours, markers)
    _draw_gains(gains, pairs, markers)
    _draw_errors(errors, rows.assign(bubble_error=rows["predicted_bubble"] - rows["measured_bubble"]), colours)
    handles = [Line2D([], [], color=colour, marker="o", ls="", ms=4, label=name) for name, colour in colours.items()]
    for number, marker in markers.items():
        handles.append(Line2D([], [], color=FAINT, marker=marker, ls="", ms=4, label=f"{number} ranks"))
    if pairs["sign_error"].any():
        handles.append(Line2D([], [], color=MISSED, marker="o", ls="", ms=3, label="order missed"))
    style.legend_above(figure, handles)
    error = rows["iteration_error"].abs().median()
    missed = int(pairs["sign_error"].sum())
    message = (
        f"Predicted iteration times differ from measured ones by {error:.1%} in the median over {len(rows)} programs; "
        f"the order is wrong in {missed} of {len(pairs)} pairs of strategies."
    )
    return style.Picture(figure, pairs, message)


def _draw_times(panel: Axes, rows: pd.DataFrame, colours: dict[str, Colour], markers: dict[str, str]) -> None:
    _diagonal(panel, rows["measured_s"], rows["predicted_s"], TARGET_ITERATION)
    for row in rows.to_dict("records"):
        mark: dict[str, Any] = {"color": colours[row["strategy"]], "marker": markers[row["num_ranks"]], "ms": 3}
        noise_s = row["noise"] * row["measured_s"]
        panel.errorbar(row["measured_s"], row["predicted_s"], xerr=noise_s, elinewidth=0.6, ls="", **mark)
    panel.set_title("Iteration time (s)")


def _draw_gains(panel: Axes, pairs: pd.DataFrame, markers: dict[str, str]) -> None:
    _diagonal(panel, pairs["measured_speedup"], pairs["predicted_speedup"], TARGET_SPEEDUP)
    panel.axhline(1.0, color=FAINT, linewidth=0.6)
    panel.axvline(1.0, color=FAINT, linewidth=0.6)
    for row in pairs.to_dict("records"):
        gain = row["measured_speedup"]
        colour = MISSED if row["sign_error"] else INK
        mark: dict[str, Any] = {"color": colour, "marker": markers[row["num_ranks"]], "ms": 3, "alpha": 0.7}
        interval = [[gain - row["low"]], [row["high"] - gain]]
        panel.errorbar(gain, row["predicted_speedup"], xerr=interval, elinewidth=0.5, ls="", **mark)
    panel.set_title("Speedups between strategies")


def _draw_errors(panel: Axes, rows: pd.DataFrame, colours: dict[str, Colour]) -> None:
    panel.axhspan(-TARGET_ITERATION * 100, TARGET_ITERATION * 100, color=GRID, alpha=0.5, linewidth=0)
    percents = 100 * rows.set_index("strategy")[[*QUANTITIES]]
    long = percents.melt(var_name="quantity", value_name="error", ignore_index=False).reset_index()
    drawn: Any = {"dodge": True, "jitter": False, "size": 2.5, "alpha": 0.7, "legend": False, "ax": panel}
    sns.stripplot(long, x="quantity", y="error", hue="strategy", palette=colours, **drawn)
    for place, middle in enumerate(percents.median()):
        panel.plot([place - 0.36, place + 0.36], [middle, middle], color=INK, linewidth=1.0)
    panel.set_xticks(range(len(QUANTITIES)), list(QUANTITIES.values()), rotation=40, ha="right", rotation_mode="anchor")
    panel.grid(visible=False, axis="x")
    panel.set(title="Error of the prediction (%)", xlabel="", ylabel="")


def _diagonal(panel: Axes, one: pd.Series, other: pd.Series, target: float) -> None:
    low = min(one.min(), other.min())
    high = max(one.max(), other.max())
    ends = [low - 0.08 * (high - low), high + 0.08 * (high - low)]
    below, above = ([share * end for end in ends] for share in (1 - target, 1 + target))
    panel.fill_between(ends, below, above, color=GRID, alpha=0.5, lw=0)
    panel.plot(ends, ends, color=FAINT, linewidth=0.6)
    panel.set(xlim=ends, ylim=ends, xlabel="Measured", ylabel="Predicted")
