"""Two tables of runs compared to the last digit: what moved, what is gone, what is new."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO, StringIO

import pandas as pd

from entrain_bench.base.errors import UserError
from entrain_bench.records.leaves import VARIANT
from entrain_bench.records.records import MEASURED, METRICS

# What a run came to; the other columns say which run it is.
OUTCOME = ("status", "reason", "layout", *(name for name in METRICS if name not in MEASURED))
MADE_BY = ("host", "code_version", "key")
_BESIDE = (*OUTCOME, *MEASURED, *MADE_BY)
# What a run is called; further columns only where these do not tell all runs apart.
NAMING = ("strategy", "workload", "model", "cluster", "seed")


@dataclass(frozen=True, slots=True)
class Drift:
    """One value of one run that is not what it was.

    Attributes:
        run: which run.
        column: of the table; empty if only one of the tables has the run.
        before, after: as they are written; whether a table has the run if there is no column.
    """

    run: str
    column: str
    before: str
    after: str

    def __str__(self) -> str:
        if not self.column:
            return f"{self.run}: {'new' if self.after else 'gone'}"
        relative = ""
        with suppress(ValueError, ZeroDivisionError):
            relative = f" ({float(self.after) / float(self.before) - 1:+.1e})"
        return f"{self.run}: {self.column} {self.before} -> {self.after}{relative}"


def read_text(csv: str) -> pd.DataFrame:
    """A table of runs with every value as it is written: equal texts are equal bits."""
    return pd.read_csv(StringIO(csv), dtype=str, keep_default_na=False)


def read_file(content: bytes) -> pd.DataFrame:
    """The same of the bytes of a committed table, a Parquet file."""
    return as_written(pd.read_parquet(BytesIO(content)))


def as_written(table: pd.DataFrame) -> pd.DataFrame:
    """The same of ``table_of`` records."""
    return read_text(table.to_csv(index=False))


def drifts(before: pd.DataFrame, after: pd.DataFrame) -> list[Drift]:
    """Everything that differs between two tables of runs.

    A setting that only one of them knows had in all runs of the other the value that most runs of the one have, for
    settings are added with what was before as their default; ``variant``, which only names what there was, that of the
    one's run that is otherwise the same. A metric that a run of the first table lacks, for it is older, has not moved.

    Args:
        before: a table of ``read_text`` with the columns of ``table.csv``.
        after: another.

    Raises:
        UserError: for a run that a table has twice.
    """
    columns = [*dict.fromkeys((*before.columns, *after.columns))]
    drifts = [
        Drift(f"column {name}", "", *("yes" if name in table.columns else "" for table in (before, after)))
        for name in columns
        if len(before)
        and len(after)
        and not (name in before.columns and name in after.columns)
        and not (name in METRICS and name in after.columns)
    ]
    before, after = _completed(before, after), _completed(after, before)
    identity = [name for name in before.columns if name not in _BESIDE]
    for table in (before, after):
        if twice := table[table.duplicated(identity)][[*NAMING]].to_numpy().tolist():
            what = f"duplicate run {' '.join(map(str, twice[0]))}"
            raise UserError(f"table: {what}. Each run must have one row; delete the duplicate or make the table again")
    old, new = (
        {tuple(row[name] for name in identity): row for row in table.to_dict("records")} for table in (before, after)
    )
    naming = _telling_apart(pd.concat([before, after])[identity].drop_duplicates())
    for run in dict.fromkeys((*old, *new)):
        one = old.get(run)
        other = new.get(run)
        row = dict(zip(identity, run, strict=True))
        name = " ".join(row[column] if column in NAMING else f"{column}={row[column]}" for column in naming)
        if one is None or other is None:
            drifts.append(Drift(name, "", *("" if table is None else "yes" for table in (one, other))))
        else:
            known = [column for column in one if column in OUTCOME and column in other]
            # A run with a result but not this metric is older.
            older = {name for name in METRICS if one.get("status") == "ok" and not one.get(name)}
            moved = [column for column in known if one[column] != other[column] and column not in older]
            drifts += [Drift(name, column, one[column], other[column]) for column in moved]
    return drifts


def _completed(table: pd.DataFrame, other: pd.DataFrame) -> pd.DataFrame:
    """The table with the settings that only the other knows."""
    settings = [name for name in other.columns if name not in (*table.columns, *_BESIDE)]
    filled = table.assign(**{name: other[name].value_counts().index[0] for name in settings if len(other)})
    if VARIANT not in settings or not len(other) or not len(table):
        return filled
    identity = [name for name in filled.columns if name in other and name not in (*_BESIDE, VARIANT)]
    named = other.sort_values(VARIANT, kind="stable").drop_duplicates(identity).set_index(identity)[VARIANT]
    rows = pd.MultiIndex.from_frame(filled[identity])
    variants = named.reindex(rows)
    return filled.assign(**{VARIANT: variants.fillna("").to_numpy()})


def _telling_apart(runs: pd.DataFrame) -> Sequence[str]:
    """The columns that name runs: ``NAMING``, and of the others those without which two would be called the same."""
    columns = [*NAMING]
    for column in runs.columns:
        if column not in columns and len(runs[[*columns, column]].drop_duplicates()) > len(
            runs[columns].drop_duplicates()
        ):
            columns.append(column)
    return columns
