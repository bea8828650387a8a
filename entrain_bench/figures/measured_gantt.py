"""One schedule, simulated and measured: real training on ranks of this machine next to the simulator.

Corresponds to arXiv:2605.27918, Figure 12; cells of ``experiments/figure/measured_gantt.yaml``. The machine is not the
simulated device, so the simulation has a time axis of its own. The last panel gives the actions their measured
durations and places them as the simulator does: the remaining difference to the measurement is transfers and the
runtime's own work. A measured optimizer step begins with the gradient norm, for which it waits for all ranks.
"""

from collections.abc import Sequence

import pandas as pd

from entrain_bench.answers.tables import run_actions, run_table
from entrain_bench.answers.timelines import slowest_replica
from entrain_bench.base.errors import UserError
from entrain_bench.figures._lanes import COLUMNS, columns_of, gantt
from entrain_bench.figures._style import Picture
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import Results
from entrain_bench.run.experiment import prepare
from entrain_bench.simulate.replay import replay

EXPERIMENT = "measured_gantt"
RUNS = True
TIMELINES = True
VIEWS = {
    "simulate": "Simulated, on the simulated device",
    "train": "Measured, on this machine",
    "replay": "Replayed with the measured durations",
}


def load(cells: Sequence[Cell], results: Results) -> pd.DataFrame:
    """The bars of both runs and of the replay; one without a timeline has its ``reason``."""
    parts = []
    for cell in cells:
        view = str(cell.config.harness["label"])
        views = (view, "replay") if view == "train" else (view,)
        actions = run_actions([cell], results)
        if actions.empty:
            (run,) = run_table([cell], results).to_dict("records")
            parts.append(pd.DataFrame({"view": views, "reason": f"{run['status']}: {run['reason']}"}))
            continue
        parts.append(slowest_replica(actions).assign(view=view))
        if view == "train":
            setting = prepare(cell.config)
            shapes = setting.source.batch(0, setting.job.global_batch, cell.config.seed)
            layout = setting.plan()
            replayed = replay(setting.strategy.program(shapes, layout, setting.profile), actions)
            actions = actions.assign(**replayed[["start_s", "end_s"]])
            parts.append(slowest_replica(actions).assign(view="replay"))
    table = pd.concat(parts, ignore_index=True)
    return table.reindex(columns=table.columns.union(COLUMNS, sort=False))


def draw(data: pd.DataFrame) -> Picture:
    """A panel a view; the measured and the replayed one share a time axis, that of the measured iteration."""
    there = data.dropna(subset="lane").astype({"deferred": bool})
    if there.empty:
        raise UserError("no run of the sweep has a timeline")
    bars = {str(view): rows for view, rows in there.groupby("view", sort=False)}
    reasons = data[data["lane"].isna()].set_index("view")["reason"].to_dict() if "reason" in data else {}
    axes_of = {view: "train" if view == "replay" else view for view in bars}
    figure = gantt(bars, VIEWS, reasons, axes_of)
    message = "The schedule was not trained on this machine."
    if {"train", "replay"} <= bars.keys():
        share = bars["replay"]["end_s"].max() / bars["train"]["end_s"].max()
        message = f"With measured durations, the simulator predicts {100 * share:.0f}% of the measured iteration."
    return Picture(figure, data[["view", *columns_of(there), *(["reason"] if reasons else [])]], message)
