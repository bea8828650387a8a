"""What the command prints: one line a cell, and a short table at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pandas as pd
from rich.console import Console
from rich.table import Table

from entrain_bench.records.records import LABELS, Record, flatten

# Wide enough for the table when the output is not a terminal.
PLAIN_WIDTH = 140
# Metric, scale and digits of each column.
COLUMNS = {
    "s/iter": ("iteration_time_s", 1.0, 3),
    "samples/s": ("samples_per_s", 1.0, 1),
    "TFLOPS/GPU": ("tflops_per_gpu", 1.0, 1),
    "MFU %": ("mfu", 100.0, 1),
    "bubble %": ("bubble_ratio", 100.0, 1),
    "enc std ms": ("encoder_forward_std_ms", 1.0, 2),
    "peak GiB": ("peak_memory_bytes", 1 / 2**30, 1),
    "gap %": ("gap_to_lower_bound", 100.0, 1),
}


def make_console() -> Console:
    """Standard output; wide enough for tables when it is not a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH)


def describe_cell(place: str, record: Record) -> str:
    """One line on a cell of a sweep that was run."""
    if record.status == "ok":
        return f"{place} {_run_name(record)}: {record.metrics['iteration_time_s']:.3f} s/iteration"
    return f"{place} {_run_name(record)}: {record.status}: {record.reason}"


def _run_name(record: Record) -> str:
    labels = record.labels
    return f"{labels['strategy']} {labels['workload']} {labels['model']} {labels['cluster']} seed {labels['seed']}"


def print_table(records: Sequence[Record]) -> None:
    """Print what succeeded, runs that differ only by their seed as one mean, and why others have no result.

    Labels that all runs share stand in the title; whatever else was swept has a column of its own.
    """
    console = make_console()
    done = [record for record in records if record.status == "ok"]
    if done:
        console.print(_table(done))
    for record in records:
        if record.status != "ok":
            line = f"{record.status}: {_run_name(record)}: {record.reason}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)


def swept_paths(records: Sequence[Record]) -> list[str]:
    """Configuration paths, the seed apart, in which records of the same labels differ."""
    names = [name for name in LABELS if name != "seed"]
    groups: dict[tuple[str, ...], list[dict[str, object]]] = {}
    for record in records:
        leaves = {path: value for path, value in flatten(record.config).items() if path != "seed"}
        groups.setdefault(tuple(str(record.labels[name]) for name in names), []).append(leaves)
    paths = {
        path: None
        for group in groups.values()
        for path in dict.fromkeys(path for leaves in group for path in leaves)
        if len({repr(leaves.get(path)) for leaves in group}) > 1
    }
    # A part that differs shows in its target; the parameters that come with it need no columns.
    parts = [path.removesuffix("_target_") for path in paths if path.endswith("._target_")]
    return [path for path in paths if path.endswith("._target_") or not path.startswith(tuple(parts) or ("\0",))]


def _table(records: Sequence[Record]) -> Table:
    swept = swept_paths(records)
    leaves = [flatten(record.config) for record in records]
    done = pd.DataFrame([record.row() for record in records])
    long = {path: path.removesuffix("._target_") for path in swept}
    short = {path: text.split(".", 1)[-1] for path, text in long.items()}
    # A short heading that two paths share would make one column of two.
    repeated = {text for text, count in Counter(short.values()).items() if count > 1}
    headings = {path: long[path] if short[path] in repeated else short[path] for path in swept}
    for path in swept:
        done[headings[path]] = [
            str(values.get(path)).rsplit(".", 1)[-1] if path.endswith("_target_") else str(values.get(path))
            for values in leaves
        ]
    labels = [name for name in LABELS if name != "seed"]
    shared = [name for name in labels[1:] if done[name].nunique() == 1]
    varying = [name for name in labels if name not in shared] + list(headings.values())
    table = Table(*varying, title=", ".join(f"{name} {done[name].iloc[0]}" for name in shared), title_style="")
    for heading in ("runs", *COLUMNS):
        table.add_column(heading, justify="right")
    for names, group in done.groupby(varying, sort=False):
        mean = group.mean(numeric_only=True)
        table.add_row(*map(str, names), str(len(group)), *(_spell(mean, *column) for column in COLUMNS.values()))
    return table


def _spell(mean: pd.Series[float], metric: str, scale: float, digits: int) -> str:
    """A metric as text; a dash where the executor does not measure it."""
    value = mean.get(metric)
    return "-" if value is None or pd.isna(value) else f"{scale * value:.{digits}f}"
