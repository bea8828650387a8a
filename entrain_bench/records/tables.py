"""Tidy tables for figures: of run records, of timelines, and of cached workload analyses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from entrain_bench.records.cells import Cell
from entrain_bench.records.labels import in_order, label_columns
from entrain_bench.records.records import Results, flatten, labels_of

# A cell whose record is absent; the other states are those of records.
MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs and what happened in them.

    Attributes:
        table: one row a cell (``run_table``).
        actions: one row an action and lane (``run_actions``).
    """

    table: pd.DataFrame
    actions: pd.DataFrame


def run_table(cells: Sequence[Cell], results: Results, settings: Mapping[str, str] | None = None) -> pd.DataFrame:
    """The rows of ``table.csv`` for the given cells, by display order of the strategies, with ``label_columns``.

    A cell without a record has the status ``missing``.

    Args:
        cells: what to look up.
        results: where the records are.
        settings: further columns, by the path of the setting in the configuration (``workload.vision_share``).
    """
    rows = []
    for cell in cells:
        record = results.read(cell.key)
        if record is None:
            row = {**labels_of(cell.config), "status": MISSING, "reason": "not run", "key": cell.key}
        else:
            row = record.row()
        leaves = flatten(cell.config.content()) if settings else {}
        swept = {column: leaves.get(path) for column, path in (settings or {}).items()}
        rows.append({**row, **swept, **label_columns(cell.config)})
    return in_order(pd.DataFrame(rows))


def run_actions(cells: Sequence[Cell], results: Results) -> pd.DataFrame:
    """Timelines of the first seed of every strategy, workload and model, where there is one.

    Returns:
        The columns of ``metrics.timeline_frame``, and before them ``strategy``, ``workload``, ``model``, ``seed`` and
        ``side``, the role of the action's module: ``encoder``, ``llm`` or ``generator``.
    """
    frames = []
    seen = set()
    for cell in cells:
        labels = labels_of(cell.config)
        names = ("strategy", "workload", "model")
        case = tuple(labels[name] for name in names)
        path = results.timeline_path(cell.key)
        if case in seen or not path.exists():
            continue
        seen.add(case)
        frame = pd.read_parquet(path)
        sides = {name: cell.config.model["modules"][name]["role"] for name in frame["module"].unique()}
        frame.insert(0, "side", frame["module"].map(sides))
        for name in ("seed", *reversed(names)):
            frame.insert(0, name, labels[name])
        frames.append(frame)
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=["strategy", "workload", "model"])


def over_seeds(data: pd.DataFrame, keys: Sequence[str], **columns: tuple[str, str]) -> pd.DataFrame:
    """One row for every combination of the keys: statistics over the runs that succeeded, and what failed.

    Args:
        data: one row a run.
        keys: what tells cases apart.
        **columns: metric and statistic (mean, min, max) of each column.

    Returns:
        The keys, ``num_runs``, the columns, ``num_ok``, ``status`` and ``reason`` of the first run without success.
    """
    metrics = list(dict.fromkeys(metric for metric, _ in columns.values()))
    done = data[data["status"] == "ok"].reindex(columns=[*keys, *metrics]).astype(dict.fromkeys(metrics, float))
    statistics = done.groupby([*keys], sort=False).agg(**columns, num_ok=(metrics[0], "size"))
    cells = data.groupby([*keys], sort=False).agg(num_runs=("status", "size"))
    problems = data[data["status"] != "ok"].groupby([*keys], sort=False)[["status", "reason"]].first()
    table = cells.join(statistics).join(problems).fillna({"num_ok": 0, "status": "ok", "reason": ""})
    return table.reset_index().astype({"num_ok": int})


def mean_over_seeds(data: pd.DataFrame, keys: Sequence[str], metric: str) -> pd.DataFrame:
    """The mean of one metric by ``over_seeds``."""
    return over_seeds(data, keys, **{metric: (metric, "mean")})
