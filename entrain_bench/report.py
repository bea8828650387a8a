"""What the command prints: one line a cell, and a short table at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd
from rich.console import Console
from rich.table import Table

from entrain_bench.records import DEGREES, LABELS, SETTINGS, Record

# Wide enough for the table when the output is not a terminal.
PLAIN_WIDTH = 140


def make_console() -> Console:
    """Standard output; wide enough for tables when it is not a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH)


def describe_cell(place: str, record: Record, seconds: float) -> str:
    """One line on a finished cell of a sweep."""
    labels = record.labels
    name = f"{labels['strategy']} {labels['workload']} {labels['model']} {labels['cluster']} seed {labels['seed']}"
    if record.status == "ok":
        return f"{place} {name}: {record.metrics['iteration_time_s']:.3f} s/iteration ({seconds:.1f} s)"
    return f"{place} {name}: {record.status}: {record.reason}"


def print_table(records: Sequence[Record]) -> None:
    """Print what succeeded, runs that differ only by their seed as one mean, and why others have no result.

    Labels that all runs share stand in the title.
    """
    rows = pd.DataFrame([record.row() for record in records])
    done = rows[rows["status"] == "ok"]
    console = make_console()
    if len(done):
        console.print(_table(done))
    for _, row in rows[rows["status"] != "ok"].iterrows():
        name = f"{row['strategy']} {row['workload']} {row['model']} {row['cluster']} seed {row['seed']}"
        console.print(f"{row['status']}: {name}: {row['reason']}", highlight=False, markup=False, soft_wrap=True)


def _table(done: pd.DataFrame) -> Table:
    labels = [name for name in LABELS if name != "seed"]
    shared = [name for name in labels[1:] if done[name].nunique() == 1]
    swept = [name for name in (*SETTINGS, *DEGREES) if done[name].nunique(dropna=False) > 1]
    varying = [name for name in labels if name not in shared] + swept
    table = Table(*varying, title=", ".join(f"{name} {done[name].iloc[0]}" for name in shared), title_style="")
    columns: dict[str, Callable[[pd.Series[float]], str]] = {
        "s/iter": lambda mean: f"{mean['iteration_time_s']:.3f}",
        "samples/s": lambda mean: f"{mean['samples_per_s']:.1f}",
        "TFLOPS/GPU": lambda mean: f"{mean['tflops_per_gpu']:.1f}",
        "MFU %": lambda mean: f"{100 * mean['mfu']:.1f}",
        "bubble %": lambda mean: f"{100 * mean['bubble_ratio']:.1f}",
        "enc std ms": lambda mean: f"{mean['encoder_forward_std_ms']:.2f}",
        "peak GiB": lambda mean: f"{mean['peak_memory_bytes'] / 2**30:.1f}",
        "gap %": lambda mean: f"{100 * mean['gap_to_lower_bound']:.1f}",
    }
    for heading in ("runs", *columns):
        table.add_column(heading, justify="right")
    for names, group in done.groupby(varying, sort=False, dropna=False):
        mean = group.mean(numeric_only=True)
        table.add_row(*map(str, names), str(len(group)), *(write(mean) for write in columns.values()))
    return table
