"""A sweep at a glance: iteration times of every strategy in every case, and the speedups of the fastest."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from entrain_bench.answers.answer import Answer
from entrain_bench.answers.sentences import sentences
from entrain_bench.answers.text import times
from entrain_bench.figures._style import (
    DOUBLE_COLUMN_IN,
    ENTRY_IN,
    FAINT,
    FONT_PT,
    INK,
    LETTER_IN,
    SINGLE_COLUMN_IN,
    Colour,
    lighter,
    palette,
    panels,
    say,
    small_png,
    strategy_colours,
)

# More are not readable; the table has them all.
MAX_CASES = 12
MAX_VARIANTS = 12
# Of the distance between two cases, the share that their bars fill.
FILLED = 0.8
# What a single column has room for: more takes a double one.
NARROW_CASES = 2
NARROW_ROWS = 3
# Height of the panel, and of a figure in which everything has room.
PANEL_IN = 1.7
ROOMY_IN = 16.0
# Width of a label above a bar, and the share of the panel's height that the longest takes.
LABEL_IN = 0.13
LABEL_SHARE = 0.42
# Letters of a line of the legend, and lines of a name in it.
LINE_LETTERS = 56
MAX_LINES = 3


def standings_png(answer: Answer) -> bytes:
    """The picture of a sweep; the same bytes for the same data."""
    return small_png(lambda: draw(answer))


def draw(answer: Answer) -> Figure:
    """Bars are means over seeds with 95% intervals; above the best stands the speedup over the baseline.

    The panel has the same height whatever stands around it.
    """
    cases = answer.cases[:MAX_CASES]
    colours = _colours(answer)
    names = _wrapped([*colours])
    narrow = len(cases) <= NARROW_CASES and len(names) <= NARROW_ROWS * _columns(names, SINGLE_COLUMN_IN)
    width_in = SINGLE_COLUMN_IN if narrow else DOUBLE_COLUMN_IN
    figure, (panel,) = panels(1, 1, width_in, ROOMY_IN)
    bar_in = FILLED * width_in / len(cases) / len(colours)
    for place, case in enumerate(cases):
        named = case.best if bar_in >= LABEL_IN else case.best[:1]
        labelled = {answer.variant(case.groups[own]) for own in named}
        rows = {answer.variant(row.group): row for row in case.results}
        for step, (name, colour) in enumerate(colours.items()):
            time = rows[name].standing.time if name in rows else None
            if not time:
                continue
            position = place + (step + 0.5) * FILLED / len(colours) - FILLED / 2
            panel.bar(position, time.mean, 0.9 * FILLED / len(colours), color=colour)
            panel.vlines(position, time.low, time.high, color=INK, linewidth=0.7)
            gain = rows[name].standing.speedup if rows[name].group.strategy != case.baseline else None
            text = "" if name not in labelled else f"  best, {times(gain.mean)}" if gain else "  best"
            panel.text(position, time.high, text, ha="center", va="bottom", rotation=90, color=INK)
    panel.set_ylabel("Iteration time (s)")
    bars = [(row.standing.time, row.best) for case in cases for row in case.results if row.standing.time]
    # Above all bars, and above the labels of the best.
    tops = [time.high / (1.0 - LABEL_SHARE if best else 0.95) for time, best in bars]
    panel.set_ylim(0.0, max(tops, default=1.0))
    panel.grid(visible=False, axis="x")
    counts = {"strategies": (MAX_VARIANTS, len(answer.variants)), "cases": (MAX_CASES, len(answer.cases))}
    cut = [f"{shown} of {there} {what}" for what, (shown, there) in counts.items() if there > shown]
    panel.set_title(f"{' and '.join(cut)}; table.csv has all" if cut else "", color=FAINT)
    _name_cases(panel, [answer.case_name(case) for case in cases], width_in)
    patches = [Patch(facecolor=colour, label=name) for name, colour in zip(names, colours.values(), strict=True)]
    figure.legend(handles=patches, loc="outside upper center", ncols=_columns(names, width_in))
    if stated := sentences(answer):
        say(figure, stated[0], FONT_PT)
    # All but the panel is as high as its texts are; a label at the panel's end depends on its height a little.
    for _ in range(2):
        figure.draw_without_rendering()
        figure.set_figheight(figure.get_figheight() + PANEL_IN - panel.get_window_extent().height / figure.dpi)
    return figure


def _columns(names: Sequence[str], width_in: float) -> int:
    """Columns of a legend of names of one or several lines."""
    longest = max((len(line) for name in names for line in name.splitlines()), default=0)
    return max(1, min(len(names), int(width_in / (ENTRY_IN + LETTER_IN * longest))))


def _wrapped(names: Sequence[str]) -> list[str]:
    """Names in lines of the legend's width; of long ones the middle is left out, where they stay apart."""
    lines = [textwrap.wrap(name, LINE_LETTERS, break_on_hyphens=False) for name in names]
    short = [
        "\n".join([*each[: MAX_LINES - 1], f"... {each[-1]}"] if len(each) > MAX_LINES else each) for each in lines
    ]
    return short if len({*short}) == len(short) else ["\n".join(each) for each in lines]


def _name_cases(panel: Axes, names: Sequence[str], width_in: float) -> None:
    """Names of the cases below them: a word a line, upright where words have no room beside each other."""
    room = width_in / max(len(names), 1) / LETTER_IN
    if all(len(word) <= room for name in names for word in name.split()):
        panel.set_xticks(range(len(names)), [name.replace(" ", "\n") for name in names])
    else:
        panel.set_xticks(range(len(names)), ["\n".join(textwrap.wrap(name, 40)) for name in names])
        panel.tick_params(axis="x", labelrotation=90)


def _colours(answer: Answer) -> dict[str, Colour]:
    """A colour for each variant: its strategy's, if all are strategies; one that another has gets lighter."""
    shown = answer.variants[:MAX_VARIANTS]
    orders = {row.group.strategy: row.group.display_order for row in answer.results}
    colours = {}
    taken = set[Colour]()
    wanted = palette(shown)
    if {*shown} <= {*orders}:
        wanted = strategy_colours({name: None if orders[name] is None else int(orders[name] or 0) for name in shown})
    for name, colour in wanted.items():
        colours[name] = lighter(colour) if colour in taken else colour
        taken.add(colour)
    return colours
