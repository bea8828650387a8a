"""What a folder of results holds, as the page takes it."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pandas as pd

from entrain_bench.answers.compare import read_text
from entrain_bench.answers.comparison import TIME
from entrain_bench.answers.cost_source import UNKNOWN, cost_source
from entrain_bench.answers.notices import notices
from entrain_bench.answers.report.build import Material
from entrain_bench.answers.report.runs import IDENTITY
from entrain_bench.answers.report.tree import Tree, with_tree
from entrain_bench.base.errors import UserError
from entrain_bench.records.code import code_version
from entrain_bench.records.keys import targets_of
from entrain_bench.records.records import METRICS, Record, Results, parameters_text, table_csv

# Groups whose parameters are in records only.
RECORDED = ("model", "cluster", "harness")
HAS_NONE = "must hold a run with a result; entrain-bench --help shows how to run"
NEEDED = ("strategy", "workload", "model", "cluster", "seed", "status", TIME)


def read_material(results: Results, tree: Tree) -> Material:
    """Everything that the page is made of.

    Raises:
        UserError: as ``read_runs`` does, and for a damaged file.
    """
    rows, num_older, samples = read_runs(results)
    return Material(
        with_tree(rows, tree),
        tree.usual(),
        version("entrain-bench"),
        num_older,
        _csv(results.root / "claims.csv", text=True),
        _csv(results.root / "fidelity.csv"),
        samples,
    )


def read_runs(results: Results) -> tuple[pd.DataFrame, int, list[str]]:
    """One row a run: the columns of ``table.csv``, ``<group>_parameters``, ``cost_source``; and what is said of them.

    Of records those of the code that would run now, if any is; of a folder that has none its table.

    Returns:
        Rows with texts, but for metrics and the seed, oldest first; the number of records of older code; what
        became of samples (``notices``).

    Raises:
        UserError: if no run has a result, or the table is damaged.
    """
    found = results.records()
    records = [record for record in found if is_current(record)] or found
    records = sorted(records, key=lambda record: results.record_path(record.key).stat().st_mtime_ns)
    table = results.root / "table.csv"
    if records:
        rows = read_text(table_csv(records)).assign(cost_source=[cost_source(r.config["cluster"]) for r in records])
        for group in RECORDED:
            rows[f"{group}_parameters"] = [parameters_text(record.config[group]) for record in records]
    elif table.exists():
        rows = _table(table)
    else:
        raise UserError(f"results_dir={results.root}: {HAS_NONE}")
    if not (rows["status"] == "ok").any():
        raise UserError(f"results_dir={results.root}: {HAS_NONE}")
    numbers = {name: pd.to_numeric(rows[name], errors="coerce") for name in METRICS}
    return rows.assign(**numbers, seed=rows["seed"].astype(int)), len(found) - len(records), notices(records)


def is_current(record: Record) -> bool:
    """Whether the code that would run the same configuration now is that of the record."""
    try:
        return record.code_version == code_version(frozenset(targets_of(record.config)))
    except UserError:
        return False


def _table(path: Path) -> pd.DataFrame:
    """The rows of a table; columns that it is older than are empty."""
    try:
        rows = read_text(path.read_text())
        rows["seed"].astype(int)
    except (ValueError, KeyError) as error:
        raise UserError(f"{path}: is no table of runs ({error})") from error
    if lacking := [name for name in NEEDED if name not in rows]:
        raise UserError(f"{path}: is no table of runs (has no column {lacking[0]})")
    columns = dict.fromkeys([*rows.columns, *IDENTITY, *METRICS, "reason", "host", "code_version", "key"])
    return rows.reindex(columns=[*columns], fill_value="").assign(cost_source=UNKNOWN)


def _csv(path: Path, text: bool = False) -> pd.DataFrame | None:
    """A table; None if there is none."""
    if not path.exists():
        return None
    try:
        return read_text(path.read_text()) if text else pd.read_csv(path)
    except ValueError as error:
        raise UserError(f"{path}: cannot be read ({error}); delete it, and make it again") from error
