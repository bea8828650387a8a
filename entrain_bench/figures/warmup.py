"""Iteration time and peak memory of 1F1B schedules against the number of encoder forwards ahead of 1F1B.

Section 5.3 of arXiv:2605.27918 runs as many as memory allows; here every strategy may, up to a number. Cells of
``experiments/figure/warmup.yaml``. Means over jobs and seeds; the CSV has every job.
"""

from collections.abc import Sequence

import pandas as pd

from entrain_bench.answers.labels import names
from entrain_bench.answers.tables import JOB, lacking, over_seeds, run_table
from entrain_bench.answers.text import listing
from entrain_bench.figures import _style as style
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import Results

EXPERIMENT = "warmup"
RUNS = True
GIB = 2**30
# Tick of the axis for no limit but memory.
UNLIMITED = "any"
PANELS = {"relative": "Iteration time, relative", "peak_memory_gib": "Peak memory (GiB)"}
KEYS = ["workload", "model", "strategy", "max_extra_forwards"]


def load(cells: Sequence[Cell], results: Results) -> pd.DataFrame:
    """The table of the sweep's runs; ``max_extra_forwards`` is a text, as it stands on the axis."""
    table = run_table(cells, results, {"max_extra_forwards": "strategy.scheduler.max_extra_forwards"})
    most = [UNLIMITED if pd.isna(number) else str(int(number)) for number in table["max_extra_forwards"]]
    return table.assign(max_extra_forwards=most)


def draw(data: pd.DataFrame) -> style.Picture:
    """Left: times over those with the fewest forwards ahead. Right: memory. A line a strategy."""
    # Columns of runs without result are absent.
    data = data.assign(peak_memory_gib=data.get("peak_memory_bytes", pd.Series(float("nan"), data.index)) / GIB)
    strategies = names(data, "strategy")
    columns = {name: (name, "mean") for name in ("iteration_time_s", "peak_memory_gib")}
    table = over_seeds(data, KEYS, **columns)
    ticks = sorted(table["max_extra_forwards"].unique(), key=lambda text: (text == UNLIMITED, text.zfill(9)))
    first = table[table["max_extra_forwards"] == ticks[0]].set_index(KEYS[:3])["iteration_time_s"]
    relative = table.join(first.rename("first_s"), on=KEYS[:3])
    relative = relative.assign(relative=relative["iteration_time_s"] / relative["first_s"])
    means = relative.groupby(KEYS[2:], sort=False)[[*PANELS]].mean().reset_index().assign(reason="")
    means["place"] = means["max_extra_forwards"].map(ticks.index)
    colours = style.system_colours(data)
    figure, axes = style.panels(1, len(PANELS), style.DOUBLE_COLUMN_IN, 2.1)
    for panel, (column, title) in zip(axes, PANELS.items(), strict=True):
        style.draw_lines(panel, means, "place", column, "strategy", colours, strategies)
        panel.set_xticks(range(len(ticks)), ticks)
        panel.set_title(title)
    axes[-1].set_ylim(bottom=0)
    figure.supxlabel(f"Forwards ahead of 1F1B, at most; mean over {len(table[JOB].drop_duplicates())} jobs")
    style.legend_above(figure, style.line_handles(colours, strategies))
    said = []
    for name, rows in means.set_index("place").groupby("strategy", sort=False):
        change = rows.loc[len(ticks) - 1, [*PANELS]] - rows.loc[0, [*PANELS]]
        said.append(f"{strategies[str(name)]} {100 * change.iloc[0]:+.0f}% time, {change.iloc[1]:+.1f} GiB")
    message = f"{ticks[-1].capitalize()} instead of {ticks[0]} forwards ahead: {listing(said)}."
    return style.Picture(figure, table, message + lacking(table, strategies))
