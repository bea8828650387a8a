"""Analyses of workloads, computed once."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any

import pandas as pd

from entrain_bench.answers.labels import label_columns
from entrain_bench.base.errors import UserError
from entrain_bench.base.files import write_atomically
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import Results, labels_of
from entrain_bench.run.experiment import prepare


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
        text = json.dumps([cell.key, compute.__name__, code, parameters], sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        path = results.root / "analysis" / f"{figure}-{key}.parquet"
        try:
            frame = pd.read_parquet(BytesIO(path.read_bytes()))
        except (OSError, ValueError):  # absent or damaged
            try:
                frame = compute(prepare(cell.config).profile, **parameters)
            except UserError as error:
                raise UserError(f"{error} (in {' '.join(cell.overrides)})") from error
            write_atomically(path, frame.to_parquet(index=False))
        labels = labels_of(cell.config)
        columns = {name: labels[name] for name in ("workload", "model")} | label_columns(cell.config)
        frames.append(pd.DataFrame({**dict.fromkeys(columns), **frame}).assign(**columns))
    return pd.concat(frames, ignore_index=True)
