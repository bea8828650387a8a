"""Standard deviation of the microbatches' forward time, by strategy, trace and model.

Corresponds to arXiv:2605.27918, Table 3; cells of ``experiments/figure/systems.yaml``. A forward time is summed over
the stages of the encoders or of the LLM; its standard deviation over the microbatches of a replica is averaged over
replicas, iterations and seeds. A strategy whose microbatches are all equal has no mark. The figure has the first model
and the first strategies, the CSV all.
"""

from typing import Any

import pandas as pd
import seaborn as sns

from entrain_bench.answers.labels import names
from entrain_bench.answers.tables import forward_std, range_of, run_table
from entrain_bench.figures import _style as style
from entrain_bench.figures._forms import SLANTED, handles, marker_of

EXPERIMENT = "systems"
RUNS = True
load = run_table
SIDES = {"encoder": "Encoder", "llm": "LLM"}
MAX_STRATEGIES = 5


def draw(data: pd.DataFrame) -> style.Picture:
    """A panel a side; traces along x, by how much their microbatches differ, a mark a strategy."""
    strategies, traces, models = (names(data, column) for column in ("strategy", "workload", "model"))
    table = forward_std(data)
    first = next(iter(models))
    shown = dict([*strategies.items()][:MAX_STRATEGIES])
    colours = {name: colour for name, colour in style.system_colours(data).items() if name in shown}
    mine = table[(table["std_ms"] > 0) & (table["model"] == first) & table["strategy"].isin(shown)]
    order = [traces[name] for name in mine.groupby("workload")["std_ms"].mean().sort_values().index]
    figure, axes = style.panels(1, len(SIDES), style.DOUBLE_COLUMN_IN, 2.2)
    look: dict[str, Any] = {"palette": colours, "markers": [*marker_of(shown).values()], "hue_order": [*shown]}
    look |= {"order": order, "linestyle": "none", "errorbar": None, "legend": False, "markersize": 3.5}
    for panel, (side, title) in zip(axes, SIDES.items(), strict=True):
        rows = mine[mine["side"] == side].assign(trace=mine["workload"].map(traces))
        sns.pointplot(
            rows, x="trace", y="std_ms", hue="strategy", ax=panel, dodge=0.5 if len(shown) > 1 else False, **look
        )
        panel.set(yscale="log", xlabel="", ylabel="", title=title)
        panel.yaxis.set_major_formatter(style.NUMBER_FORMAT)
        panel.set_xticks(range(len(order)), order, **SLANTED)
        panel.grid(visible=True, axis="y")
    axes[0].set_ylabel("std of forward time (ms)")
    style.legend_above(figure, handles(colours, shown, line=""))
    llm = range_of(data, table[table["side"] == "llm"], "std_ms", "{:.3g} ms")
    where = f"Shown: {models[first]}. " if len(models) > 1 else ""
    return style.Picture(figure, table, f"{where}Standard deviation of the LLM's forward time: {llm}.")
