"""Tidy tables for figures: of run records, of timelines, and of cached workload analyses."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import pandas as pd

from entrain_bench.compose import Cell
from entrain_bench.errors import UserError
from entrain_bench.experiment import prepare
from entrain_bench.figures._labels import in_order, label_columns
from entrain_bench.records import Results, flatten, identify, labels_of, write_atomically
from entrain_bench.specs.model import Role

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
        key, _ = identify(cell.config)
        record = results.read(key)
        absent = {**labels_of(cell.config), "status": MISSING, "reason": "not run", "key": key}
        leaves = flatten(cell.config.content()) if settings else {}
        swept = {column: leaves.get(path) for column, path in (settings or {}).items()}
        rows.append({**(record.row() if record else absent), **swept, **label_columns(cell.config)})
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
        path = results.timeline_path(identify(cell.config)[0])
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


def extreme_replica(actions: pd.DataFrame, column: str) -> pd.DataFrame:
    """The actions on the lanes of the LLM replica where a column of forwards and backwards is highest."""
    replicas = actions[(actions["side"] == Role.LLM) & (actions["replica"] >= 0)]["replica"].unique()
    frames = [replica_lanes(actions, replica) for replica in replicas]
    return max(frames, key=lambda frame: float(frame[frame["replica"] >= 0][column].max()))


def replica_lanes(actions: pd.DataFrame, replica: int) -> pd.DataFrame:
    """The actions, steps included, of the lanes that hold an LLM replica and of the encoder stages that feed it.

    Encoders on lanes of their own with another DP feed the LLM's replicas in order.

    Returns:
        The actions, lanes counted from 0, those with encoder work first.
    """
    work = actions[actions["replica"] >= 0]
    llm, encoder = (work[work["side"] == side] for side in (Role.LLM, Role.ENCODER))
    lanes = {*llm[llm["replica"] == replica]["lane"]}
    encoding = {*encoder["lane"]}
    if not lanes & encoding:
        feeding = replica * encoder["replica"].nunique() // llm["replica"].nunique()
        lanes |= {*encoder[encoder["replica"] == feeding]["lane"]}
    place = {lane: index for index, lane in enumerate(sorted(lanes, key=lambda lane: (lane not in encoding, lane)))}
    mine = actions[actions["lane"].isin(lanes)]
    return mine.assign(lane=mine["lane"].map(place)).reset_index(drop=True)


def analyse(
    cells: Sequence[Cell], results: Results, figure: str, compute: Callable[..., pd.DataFrame], **parameters: Any
) -> pd.DataFrame:
    """Tables of ``compute(profile, **parameters)`` for every cell, read from the cache where they are there.

    They are kept as ``analysis/<figure>-<key>.parquet``, the key being a hash of the run key (configuration, workload
    data, code), the analysis code and the parameters.

    Returns:
        The tables one below the other, with the columns ``workload``, ``model`` and those of ``label_columns``.
    """
    code = inspect.getsource(inspect.getmodule(compute) or compute)
    frames = []
    for cell in cells:
        text = json.dumps([identify(cell.config)[0], compute.__name__, code, parameters], sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        path = results.root / "analysis" / f"{figure}-{key}.parquet"
        frame = _read(path.read_bytes()) if path.exists() else None
        if frame is None:
            try:
                frame = compute(prepare(cell.config).profile, **parameters)
            except UserError as error:
                raise UserError(f"{error} (in {' '.join(cell.overrides)})") from error
            write_atomically(path, frame.to_parquet(index=False))
        labels = labels_of(cell.config)
        columns = {name: labels[name] for name in ("workload", "model")} | label_columns(cell.config)
        frames.append(pd.DataFrame({**dict.fromkeys(columns), **frame}).assign(**columns))
    return pd.concat(frames, ignore_index=True)


def _read(content: bytes) -> pd.DataFrame | None:
    """A cached table; None if the file is damaged."""
    try:
        return pd.read_parquet(BytesIO(content))
    except (OSError, ValueError):
        return None
