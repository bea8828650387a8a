"""Where the time of the fastest strategy and its rivals goes, as a table and in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from entrain_bench.answers.console_table import GAP, Column, table_lines
from entrain_bench.answers.text import TIME_WORDS, decimals

# Seconds of an iteration by strategy and class, the fastest strategy first.
type Spent = Mapping[str, Mapping[str, float]]

# The first of the classes: what every strategy has to do.
WORK = next(iter(TIME_WORDS))
# Of a difference, parts below this share of it are not named.
LEAST_PART = 0.1


def spent_lines(spent: Spent, width: int) -> list[str]:
    """A row for each class that anybody has of, a column for each strategy that there is room for."""
    totals = [math.fsum(seconds.values()) for seconds in spent.values()]
    digits = decimals(totals)
    shown = [name for name in TIME_WORDS if any(round(seconds[name], digits) for seconds in spent.values())]
    columns = [Column("", [*(TIME_WORDS[name] for name in shown), "iteration"])]
    for (strategy, seconds), total in zip(spent.items(), totals, strict=True):
        values = [*(seconds[name] for name in shown), total]
        columns.append(Column(strategy, [f"{value:.{digits}f}" for value in values]))
    while len(columns) > 2 and sum(column.width + len(GAP) for column in columns) - len(GAP) > width:
        columns.pop()
    return table_lines(columns, 1)


def loss_words(spent: Spent) -> Iterator[str]:
    """How much of its time the fastest works, and what takes each of the others longer."""
    (best, own), *others = spent.items()
    total = math.fsum(own.values())
    digits = decimals([total])
    rest = max((name for name in own if name != WORK), key=lambda name: own[name])
    yield (
        f"{own[WORK] / total:.0%} of {best}'s GPU time is {_plain(WORK)}; the largest part of the rest is "
        f"{_plain(rest)} ({own[rest] / total:.0%})."
    )
    for strategy, seconds in others:
        behind = math.fsum(seconds.values()) - total
        change = {name: seconds[name] - own[name] for name in TIME_WORDS}
        ranked = sorted(change, key=lambda name: -abs(change[name]))
        named = [name for name in ranked if change[name] and abs(change[name]) >= LEAST_PART * abs(behind)]
        parts = ", ".join(f"{_plain(name)} {change[name]:+.{digits}f}" for name in named)
        yield f"{strategy} takes {abs(behind):.{digits}f} s {'more' if behind >= 0 else 'less'}: {parts}."


def _plain(name: str) -> str:
    """A class within a sentence."""
    return TIME_WORDS[name].partition(":")[0].replace(",", " and")
