"""How far simulated seconds are from published ones, as figures state it."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from entrain_bench.figures._style import FAINT, FONT_PT

# Of figures that show times, none is measured but these.
MEASURED = frozenset({"measured_gantt"})
UNITS = ("(s)", "(ms)")
# Of docs/calibration.md, whose generation checks it.
MODEL_ERROR = "model error: median 3.0%, worst 9.0% over 23 published iteration times of language models"


def state_model_error(figure: Figure) -> None:
    """Put the model error below a figure with an axis in seconds."""
    lowest = figure.subfigs[-1] if figure.subfigs else figure
    labels = [axes.get_xlabel() + axes.get_ylabel() for axes in figure.findobj(Axes)] + [lowest.get_supxlabel()]
    if any(unit in label for label in labels for unit in UNITS):
        below = "\n".join(filter(None, (lowest.get_supxlabel(), MODEL_ERROR)))
        lowest.supxlabel(below, fontsize=FONT_PT - 2, color=FAINT)
