"""Schedules of the strategies on one global batch: the passes of every stage of a replica over time.

Corresponds to arXiv:2605.27918, Figure 12; cells of ``experiments/figure/schedule_gantt.yaml``. Each strategy shows its
slowest replica in the first iteration, or the ranks of a widest group, where a group is one bar with its degrees. A
deferred part is a part of a microbatch after its first: the encoder work of samples whose LLM microbatch comes later.
The figure has the first strategies, the CSV all.
"""

from collections.abc import Sequence

import pandas as pd

from entrain_bench.answers.labels import names
from entrain_bench.answers.tables import run_actions, run_table
from entrain_bench.answers.text import seconds
from entrain_bench.answers.timelines import bars_of
from entrain_bench.figures._lanes import columns_of, gantt
from entrain_bench.figures._style import Picture
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import Results

EXPERIMENT = "schedule_gantt"
RUNS = True
TIMELINES = True
LANE_IN = 0.045
MAX_PANELS = 6


def load(cells: Sequence[Cell], results: Results) -> pd.DataFrame:
    """The bars of every strategy; one without a timeline has a row with its ``reason``."""
    return bars_of(run_table(cells, results), run_actions(cells, results))


def draw(data: pd.DataFrame) -> Picture:
    """A panel a strategy, over one time axis for all."""
    labels = dict([*names(data, "strategy").items()][:MAX_PANELS])
    there = data.dropna(subset="lane").astype({"deferred": bool})
    bars = {str(name): rows for name, rows in there.groupby("strategy", sort=False) if name in labels}
    reasons = data[data["lane"].isna()].set_index("strategy")["reason"].to_dict() if "reason" in data else {}
    ends = {name: float(rows["end_s"].max()) for name, rows in bars.items()}
    ordered = sorted(ends, key=ends.__getitem__)
    figure = gantt(bars, labels, reasons, dict.fromkeys(bars, ordered[-1]), LANE_IN)
    said = " and ".join(f"{seconds(ends[name])} s with {labels[name]}" for name in (ordered[0], ordered[-1]))
    columns = ["strategy", *columns_of(there), *(["reason"] if reasons else [])]
    return Picture(figure, data[columns], f"The same batch takes {said}.")
