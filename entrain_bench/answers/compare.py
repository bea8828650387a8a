"""Two tables of runs compared to the last digit: values that moved, runs that are gone and new."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import BytesIO, StringIO
from typing import Any

import pandas as pd

from entrain_bench.base.errors import UserError
from entrain_bench.records.records import MEASURED, METRICS

# Results of a run; the other columns say which run it is.
OUTCOME = ("status", "reason", "layout", *(name for name in METRICS if name not in MEASURED))
BESIDE = (*OUTCOME, *MEASURED, "host", "code_version", "key")
# Columns that name a run; further columns only where these do not tell all runs apart.
NAMING = ("strategy", "workload", "model", "cluster", "seed")


def read_text(csv: str) -> pd.DataFrame:
    """Return a table of runs with unparsed values: equal texts are equal bits."""
    return pd.read_csv(StringIO(csv), dtype=str, keep_default_na=False)


def read_file(content: bytes) -> pd.DataFrame:
    """Return the table of the bytes of a committed table, a Parquet file, as ``read_text`` does."""
    return as_written(pd.read_parquet(BytesIO(content)))


def as_written(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table of records (``table_of``) as ``read_text`` does."""
    return read_text(table.to_csv(index=False))


def drifts(before: pd.DataFrame, after: pd.DataFrame) -> list[str]:
    """Return a line for everything that differs between two tables of ``read_text``.

    A setting that only one of them knows had in all runs of the other the value that most runs of the one have, because
    settings are added with the former behavior as their default. A metric that a run of the first table lacks, because
    it is older, has not moved. ``UserError`` for a run that a table has twice.
    """
    columns = [*dict.fromkeys((*before.columns, *after.columns))]
    apart = {*before.columns} ^ {*after.columns} if len(before) and len(after) else set()
    lines = [
        f"column {name}: {'new' if name in after else 'gone'}"
        for name in columns
        if name in apart and not (name in METRICS and name in after)
    ]
    whole = _completed(before, after), _completed(after, before)
    identity = [name for name in whole[0].columns if name not in BESIDE]
    for table in whole:
        if twice := table[table.duplicated(identity)][[*NAMING]].to_numpy().tolist():
            name = " ".join(map(str, twice[0]))
            raise UserError(
                f"table: duplicate run {name}. Each run must have one row; delete one or make the table again"
            )
    old, new = ({tuple(row[name] for name in identity): row for row in table.to_dict("records")} for table in whole)
    naming = _naming(pd.concat(whole)[identity].drop_duplicates())
    for run in dict.fromkeys((*old, *new)):
        values = dict(zip(identity, run, strict=True))
        name = " ".join(values[column] if column in NAMING else f"{column}={values[column]}" for column in naming)
        if run in old and run in new:
            lines += [f"{name}: {line}" for line in _moved(old[run], new[run])]
        else:
            lines.append(f"{name}: {'new' if run in new else 'gone'}")
    return lines


def _moved(before: Mapping[Any, str], after: Mapping[Any, str]) -> list[str]:
    # A run with a result but not this metric is older.
    older = {name for name in METRICS if before.get("status") == "ok" and not before.get(name)}
    lines = []
    for name in (name for name in before if name in OUTCOME and name in after and name not in older):
        was = before[name]
        now = after[name]
        if was != now:
            relative = ""
            with suppress(ValueError, ZeroDivisionError):
                relative = f" ({float(now) / float(was) - 1:+.1e})"
            lines.append(f"{name} {was} -> {now}{relative}")
    return lines


def _completed(table: pd.DataFrame, other: pd.DataFrame) -> pd.DataFrame:
    settings = [name for name in other.columns if name not in (*table.columns, *BESIDE)]
    return table.assign(**{name: other[name].value_counts().index[0] for name in settings if len(other)})


def _naming(runs: pd.DataFrame) -> Sequence[str]:
    """Return ``NAMING``, and the columns in which runs differ that would be called the same."""
    numbers = runs.groupby([*NAMING]).nunique()
    return [*NAMING, *numbers.columns[(numbers > 1).any()]]
