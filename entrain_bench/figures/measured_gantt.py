"""One schedule, simulated and measured: real training on ranks of this machine next to the simulator.

Corresponds to arXiv:2605.27918, Figure 12; cells of ``experiments/figure/measured_gantt.yaml``. The machine is not the
simulated device, so the simulation has a time axis of its own. The last panel gives the actions their measured
durations and places them as the simulator does: what is then still shorter than measured is transfers and the runtime's
own work. A measured optimizer step begins with the gradient norm, for which it waits for all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from entrain_bench.answers.tables import Runs, run_actions, run_table
from entrain_bench.base.errors import UserError
from entrain_bench.figures._lanes import colours_of, draw_lanes, slowest_replica
from entrain_bench.figures._style import DOUBLE_COLUMN_IN, Picture, legend_above, panels, show_reason
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
LANE_IN = 0.16
# Shorter iterations have an axis in milliseconds.
SHORT_S = 0.1


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
    colours = colours_of(shown)
    height = 1.3 + len(VIEWS) * (0.25 + LANE_IN * shown["lane"].nunique())
    figure, axes = panels(len(VIEWS), 1, DOUBLE_COLUMN_IN, height)
    reasons = dict(zip(data.table["harness"], data.table["status"] + ": " + data.table["reason"], strict=True))
    for panel, (view, title) in zip(axes, VIEWS.items(), strict=True):
        panel.set_title(title, loc="left")
        if view not in bars:
            show_reason(panel, reasons["train" if view == "replay" else view])
            continue
        axis = bars["train" if view == "replay" else view]
        draw_lanes(panel, bars[view], colours, 1.01 * axis["end_s"].max())
        # The simulated device is many times faster than this machine.
        unit, scale = ("ms", 1e3) if axis["end_s"].max() < SHORT_S else ("s", 1.0)
        panel.set_title(f"{scale * bars[view]['end_s'].max():.3g} {unit}", loc="right")
        panel.xaxis.set_major_formatter(FuncFormatter(lambda time_s, _, scale=scale: f"{scale * time_s:g}"))
        if view != "train" or "replay" not in bars:
            panel.set_xlabel(f"Time ({unit})")
    legend_above(figure, [Patch(facecolor=colour, label=label) for label, colour in colours.items()], columns=4)
    columns = ["view", "lane", "stage", "module", "pass", "microbatch", "part", "deferred", "start_s", "end_s"]
    return Picture(figure, shown[columns], _message(bars))


def _message(bars: Mapping[str, pd.DataFrame]) -> str:
    """How much of the measured iteration the simulator explains with measured durations."""
    if not {"train", "replay"} <= bars.keys():
        return "The schedule was not trained on this machine."
    measured, placed = (float(bars[view]["end_s"].max()) for view in ("train", "replay"))
    return f"With measured durations, the simulator predicts {100 * placed / measured:.0f}% of the measured iteration."
