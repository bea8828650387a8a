"""Schedules of the strategies on one global batch: the passes of every stage of a replica over time.

Corresponds to arXiv:2605.27918, Figure 12; cells of ``experiments/figure/schedule_gantt.yaml``. Each strategy shows its
slowest replica in the first iteration, or the ranks of a widest group, where a group is one bar with its degrees. A
deferred part is a part of a microbatch after its first: the encoder work of samples whose LLM microbatch comes later.
"""

from collections.abc import Sequence

import pandas as pd

from entrain_bench.answers.labels import names
from entrain_bench.answers.tables import Runs, run_actions, run_table
from entrain_bench.answers.text import seconds
from entrain_bench.base.errors import UserError
from entrain_bench.figures._lanes import gantt, slowest_replica
from entrain_bench.figures._style import Picture
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import Results

EXPERIMENT = "schedule_gantt"
RUNS = True
TIMELINES = True
LANE_IN = 0.045


def load(cells: Sequence[Cell], results: Results) -> Runs:
    """The table of the runs and their timelines."""
    return Runs(run_table(cells, results), run_actions(cells, results))


def draw(data: Runs) -> Picture:
    """A panel a strategy, over one time axis for all."""
    if data.actions.empty:
        raise UserError("figure=schedule_gantt: no run of the sweep has a timeline")
    labels = names(data.table, "strategy")
    bars = {str(name): slowest_replica(rows) for name, rows in data.actions.groupby("strategy", sort=False)}
    runs = data.table.drop_duplicates("strategy").set_index("strategy")
    reasons = runs["status"].where(runs["status"] != "ok", "no timeline kept") + ": " + runs["reason"]
    ends = {name: float(rows["end_s"].max()) for name, rows in bars.items()}
    first = min(ends, key=ends.__getitem__)
    last = max(ends, key=ends.__getitem__)
    figure = gantt(
        bars, labels, {str(name): str(text) for name, text in reasons.items()}, dict.fromkeys(bars, last), LANE_IN
    )
    said = " and ".join(f"{seconds(ends[name])} s with {labels[name]}" for name in (first, last))
    columns = ["strategy", "lane", "stage", "module", "pass", "microbatch", "part", "deferred", "start_s", "end_s"]
    shown = pd.concat([rows.assign(strategy=name) for name, rows in bars.items()])
    table = shown[[*columns, *["group"] * ("group" in shown)]]
    return Picture(figure, table, f"The same batch takes {said}.")
