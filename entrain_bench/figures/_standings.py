"""A sweep at a glance: iteration times of every strategy in every case, and the speed-ups of the fastest."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from entrain_bench.figures._style import (
    DOUBLE_COLUMN_IN,
    INK,
    SINGLE_COLUMN_IN,
    Colour,
    legend_above,
    palette,
    panels,
    small_png,
    strategy_colours,
)
from entrain_bench.records.cases import Case, Row
from entrain_bench.tracking.sweep import Sweep

# More are not readable; the table has them all.
MAX_CASES, MAX_VARIANTS = 12, 12
# Of the distance between two cases, the share that their bars fill.
FILLED = 0.8
NARROW_CASES = 2


def standings_png(sweep: Sweep) -> bytes:
    """The picture of a sweep; the same bytes for the same data."""
    return small_png(lambda: draw(sweep))


def draw(sweep: Sweep) -> Figure:
    """Bars are means over seeds with 95 % intervals; above the best stands the speed-up over the baseline."""
    cases, colours = sweep.cases[:MAX_CASES], _colours(sweep)
    width_in = SINGLE_COLUMN_IN if len(cases) <= NARROW_CASES else DOUBLE_COLUMN_IN
    figure, (panel,) = panels(1, 1, width_in, 2.4)
    for place, case in enumerate(cases):
        _draw_case(panel, place, {sweep.variant(row.contender): row for row in case.rows}, case, colours)
    panel.set_xticks(range(len(cases)), [sweep.case_name(case).replace(" ", "\n") for case in cases])
    panel.set_ylabel("Iteration time (s)")
    panel.margins(y=0.25)
    panel.grid(visible=False, axis="x")
    legend_above(figure, [Patch(facecolor=colour, label=variant) for variant, colour in colours.items()])
    return figure


def _colours(sweep: Sweep) -> dict[str, Colour]:
    """A colour for each variant: its strategy's, where no other variant has that."""
    shown = sweep.variants[:MAX_VARIANTS]
    orders = {row.contender.strategy: row.contender.display_order for row in sweep.rows}
    if {*shown} <= {*orders}:
        return strategy_colours({name: None if orders[name] is None else int(orders[name] or 0) for name in shown})
    return palette(shown)


def _draw_case(panel: Axes, place: int, rows: Mapping[str, Row], case: Case, colours: Mapping[str, Colour]) -> None:
    width = FILLED / len(colours)
    for step, (variant, colour) in enumerate(colours.items()):
        standing = rows[variant].standing if variant in rows else None
        if not standing or not standing.time:
            continue
        time, position = standing.time, place + (step + 0.5) * width - FILLED / 2
        panel.bar(position, time.mean, 0.9 * width, color=colour)
        panel.vlines(position, time.low, time.high, color=INK, linewidth=0.7)
        if rows[variant].best:
            gain = standing.speedup if rows[variant].contender.strategy != case.baseline else None
            text = f"  best, {gain.mean:.2f}\N{MULTIPLICATION SIGN}" if gain else "  best"
            panel.text(position, time.high, text, ha="center", va="bottom", rotation=90, color=INK)
