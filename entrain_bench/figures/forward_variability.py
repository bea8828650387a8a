"""Standard deviation of the microbatches' forward time, by strategy, trace and model.

Corresponds to arXiv:2605.27918, Table 3; cells of ``experiments/figure/systems.yaml``. A forward time is summed over
the stages of the encoders or of the LLM; its standard deviation over the microbatches of a replica is averaged over
replicas, iterations and seeds. A strategy whose microbatches are all alike has no mark.
"""

from typing import Any

import pandas as pd
import seaborn as sns

from entrain_bench.answers.labels import names
from entrain_bench.answers.tables import CASE, interval_over_seeds, range_of, run_table
from entrain_bench.figures import _style as style

EXPERIMENT = "systems"
RUNS = True
load = run_table
SIDES = {"encoder": "Encoder", "llm": "LLM"}


def draw(data: pd.DataFrame) -> style.Picture:
    """A row of panels a model, a column a side; traces along x, a mark a strategy."""
    strategies, traces, models = (names(data, column) for column in ("strategy", "workload", "model"))
    colours = style.system_colours(data)
    table = forward_std(data)
    figure, axes = style.panels(len(models), len(SIDES), style.DOUBLE_COLUMN_IN, 0.5 + 1.75 * len(models), sharex=True)
    shown = table[table["std_ms"] > 0].assign(trace=table["workload"].map(traces))
    places = [(model, side) for model in models for side in SIDES]
    for panel, (model, side) in zip(axes, places, strict=True):
        rows = shown[(shown["model"] == model) & (shown["side"] == side)]
        look: dict[str, Any] = {"palette": colours, "markers": [*style.marker_of(strategies).values()]}
        look |= {"hue_order": [*strategies], "order": [*traces.values()], "linestyle": "none", "errorbar": None}
        look |= {"dodge": 0.6 if len(strategies) > 1 else False, "legend": False}
        sns.pointplot(rows, x="trace", y="std_ms", hue="strategy", ax=panel, markersize=3.5, **look)
        panel.set(yscale="log", xlabel="", ylabel="")
        panel.yaxis.set_major_formatter(style.NUMBER_FORMAT)
        panel.set_title(f"{SIDES[side]}, {models[model]}" if len(models) > 1 else SIDES[side])
        panel.grid(visible=True, axis="y")
    figure.supylabel("Standard deviation of forward time (ms)")
    style.legend_above(figure, style.line_handles(colours, strategies, line=""))
    llm = range_of(data, table[table["side"] == "llm"], "std_ms", "{:.3g} ms")
    return style.Picture(figure, table, f"Standard deviation of the LLM's forward time: {llm}.")


def forward_std(data: pd.DataFrame) -> pd.DataFrame:
    """The metrics ``<side>_forward_std_ms`` as ``std_ms`` with its interval, over the seeds that succeeded."""
    sides = []
    for side in SIDES:
        metric = f"{side}_forward_std_ms"
        means = interval_over_seeds(data, CASE, metric)
        means.columns = means.columns.str.replace(metric, "std_ms")
        columns = [*CASE, "side", "std_ms", "std_ms_low", "std_ms_high"]
        sides.append(means[means["num_ok"] > 0].assign(side=side)[columns])
    return pd.concat(sides, ignore_index=True)
