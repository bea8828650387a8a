"""One schedule, simulated and measured: real training on ranks of this machine next to the simulator.

Corresponds to arXiv:2605.27918, Figure 12; cells of ``experiments/figure/measured_gantt.yaml``. The machine is not the
simulated device, so the simulation has a time axis of its own. The last panel gives the actions their measured
durations and places them as the simulator does: what is then still shorter than measured is transfers and the runtime's
own work. A measured optimizer step begins with the gradient norm, for which it waits for all ranks.
"""

from collections.abc import Sequence

import pandas as pd

from entrain_bench.answers.tables import Runs, run_actions, run_table
from entrain_bench.base.errors import UserError
from entrain_bench.figures._lanes import gantt, slowest_replica
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
    "replay": "Measured durations placed by the simulator",
}


def load(cells: Sequence[Cell], results: Results) -> Runs:
    """The table of the two runs and their timelines; the column ``view`` tells simulated, measured and replayed."""
    frames = []
    for cell in cells:
        actions = run_actions([cell], results)
        view = str(cell.config.harness["label"])
        if actions.empty:
            continue
        frames.append(actions.assign(view=view))
        if view == "train":
            setting = prepare(cell.config)
            shapes = setting.source.batch(0, setting.job.global_batch, cell.config.seed)
            layout = setting.plan()
            replayed = replay(setting.strategy.program(shapes, layout, setting.profile), actions)
            frames.append(actions.assign(view="replay", **replayed[["start_s", "end_s"]]))
    return Runs(run_table(cells, results), pd.concat(frames, ignore_index=True) if frames else pd.DataFrame())


def draw(data: Runs) -> Picture:
    """A panel a view; the measured and the replayed one share a time axis, that of the measured iteration."""
    if data.actions.empty:
        raise UserError("figure=measured_gantt: no run of the sweep has a timeline")
    bars = {str(view): slowest_replica(rows) for view, rows in data.actions.groupby("view", sort=False)}
    shown = pd.concat(bars.values(), ignore_index=True)
    reasons = dict(zip(data.table["harness"], data.table["status"] + ": " + data.table["reason"], strict=True))
    axes_of = {view: "train" if view == "replay" else view for view in bars}
    figure = gantt(bars, VIEWS, {**reasons, "replay": reasons.get("train", "")}, axes_of)
    message = "The schedule was not trained on this machine."
    if {"train", "replay"} <= bars.keys():
        share = bars["replay"]["end_s"].max() / bars["train"]["end_s"].max()
        message = f"With measured durations, the simulator predicts {100 * share:.0f}% of the measured iteration."
    columns = ["view", "lane", "stage", "module", "pass", "microbatch", "part", "deferred", "start_s", "end_s"]
    return Picture(figure, shown[columns], message)
