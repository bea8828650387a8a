"""What a user should know of the samples that runs were given: how many were cut, left out, or used again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from entrain_bench.records.records import Record


def notices(records: Sequence[Record]) -> list[str]:
    """A line on every workload that was not taken as it is, each line once."""
    return list(dict.fromkeys(line for record in records if record.samples for line in _lines(record)))


def _lines(record: Record) -> Iterator[str]:
    samples, batch = record.samples, record.config["global_batch"]
    listed, truncated, dropped = (samples[name] for name in ("listed", "truncated", "dropped"))
    name = f"workload {record.labels['workload']}"
    if truncated or dropped:
        parts = [f"{count} {done}" for count, done in ((truncated, "truncated"), (dropped, "dropped")) if count]
        yield (
            f"{name}: of {listed + dropped} rows {' and '.join(parts)}, longer than the context of "
            f"model {record.labels['model']}"
        )
    if listed < batch:
        yield (
            f"{name}: {listed} row{'s' if listed > 1 else ''} for a global batch of {batch}: every row is used "
            f"{batch / listed:.1f} times an iteration on average"
        )
