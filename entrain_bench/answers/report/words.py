"""Numbers and names as the page writes them."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from entrain_bench.answers.report.cases import Case
from entrain_bench.answers.report.page import Text
from entrain_bench.answers.statistics import Interval
from entrain_bench.answers.tables import STATUSES

TIMES = "\N{MULTIPLICATION SIGN}"


def speedup(case: Case, strategy: str) -> str:
    """A strategy's speed-up over the baseline, as ``ratio`` writes it."""
    found = case.comparison.standings[strategy].speedup
    return ratio(found) if found else "no shared seed"


def ratio(interval: Interval) -> str:
    """A speed-up and, of several seeds, its interval: ``1.52x (1.48 to 1.56)``."""
    text = f"{interval.mean:.2f}{TIMES}"
    return text + (f" ({interval.low:.2f} to {interval.high:.2f})" if interval.num_values > 1 else "")


def seconds(value: float) -> str:
    """Seconds with three digits after the point, as other tables have them; a dash where there is none."""
    return "-" if pd.isna(value) else f"{value:.3f}"


def listing(words: Sequence[str]) -> str:
    """``a, b and c``."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def count(number: int, noun: str) -> str:
    """``1 run``, ``2 runs``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def of_case(case: Case) -> str:
    """What a case is called: ``Llama 3B on ChartQA``."""
    return f"{case.model} on {case.workload}"


def runs_link(case: Case) -> Text:
    """The link from a row of numbers to the command of its runs."""
    return Text(f"{len(case.runs)}", link=case.anchor)


def status(case: Case, strategy: str) -> str:
    """What stands where a strategy has not all its results: ``fails``, ``fails at 2 of 8 seeds``; else nothing."""
    row = case.summary[strategy]
    lacking = int(row["num_runs"] - row["num_ok"])
    if not lacking:
        return ""
    verb = STATUSES[str(row["status"])]
    return verb if lacking == row["num_runs"] else f"{verb} at {lacking} of {int(row['num_runs'])} seeds"
