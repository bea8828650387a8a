"""Records as tables, and tables as small Parquet files: equal tables give equal bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd
from filelock import FileLock

from entrain_bench.base.files import write_atomically
from entrain_bench.records.leaves import VARIANT, setting_text, variant_text
from entrain_bench.records.metrics import TIME
from entrain_bench.records.records import DEGREES, METRICS, RARE, REQUESTS, SETTINGS, Record, Results
from entrain_bench.records.time_shares import EXPERT_SHARES

LOCK_TIMEOUT_S = 60.0
# Compression level of zstd; higher ones save a thirtieth and take ten times as long.
LEVEL = 9
# The time over the bound that holds for every layout, less 1: it compares layouts, and follows from stored metrics.
GAP = "gap_to_cluster_bound"


def parquet_of(table: pd.DataFrame) -> bytes:
    """A table as a file, floats to the last bit."""
    content = table.to_parquet(index=False, compression="zstd", compression_level=LEVEL, use_dictionary=False)
    return bytes(content)


def write_tables(results: Results) -> None:
    """Write ``table.csv``, the tidy table of all records."""
    results.root.mkdir(parents=True, exist_ok=True)
    with FileLock(str(results.root / "table.lock"), timeout=LOCK_TIMEOUT_S):
        write_atomically(results.root / "table.csv", table_csv(results.records()).encode())


def with_bounds(record: Record) -> Record:
    """A record with ``GAP``, and with bounds of its layout that are at least those of every layout."""
    metrics = record.metrics
    if not {TIME, "cluster_bound_s", "lower_bound_s"} <= metrics.keys():
        return record
    bound = metrics["cluster_bound_s"]
    gap = metrics[TIME] / bound - 1.0
    raised = {"lower_bound_s": bound, "gap_to_lower_bound": gap} if metrics["lower_bound_s"] < bound else {}
    return replace(record, metrics={**metrics, **raised, GAP: gap})


def table_of(records: Sequence[Record]) -> pd.DataFrame:
    """Records as a table: ``Record.row`` and ``variant``."""
    table = pd.DataFrame([record.row for record in records])
    if len(table):
        place = table.columns.tolist().index("workload_parameters") + 1
        table.insert(place, VARIANT, [variant_text(record.config) for record in records])
        # A user's metric, as those of experts, may exist for some runs only, but its column follows the others.
        added = [name for name in EXPERT_SHARES if name in table]
        added += sorted({name for record in records for name in record.added})
        rest = [name for name in table.columns if name not in added]
        place = rest.index(METRICS[-1]) + 1
        table = table[[*rest[:place], *added, *rest[place:]]]
        settings = [name for name in SETTINGS if name in table]
        rest = [name for name in table.columns if name not in settings]
        place = table.columns.tolist().index(settings[0])
        usual = {name: setting_text(value) for name, value in RARE.items()}
        table = table[[*rest[:place], *settings, *rest[place:]]].fillna(usual)
        for name in reversed([one for one in REQUESTS if one in table]):
            table.insert(table.columns.tolist().index(DEGREES[-1]) + 1, name, table.pop(name))
    # Whole numbers, also if the planner chooses other rows' values.
    whole = (*DEGREES, "layout_ep", "microbatch_size", "pad_to_multiple_of")
    return table.astype({name: "Int64" for name in whole if name in table})


def table_csv(records: Sequence[Record]) -> str:
    """Records as the text of ``table.csv``, bounds included; every number has its shortest unique text."""
    return table_of([*map(with_bounds, records)]).to_csv(index=False, lineterminator="\n")
