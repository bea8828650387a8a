"""What a user should know of runs: samples that were cut, left out, or used again, and what runs remark themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from entrain_bench.records.records import Record
from entrain_bench.specs.workload import Counts


def notices(records: Sequence[Record]) -> list[str]:
    """What there is to know of samples, then what runs remark."""
    return [*sample_notices(records), *run_notices(records)]


def sample_notices(records: Sequence[Record]) -> list[str]:
    """A line on every workload that was not taken as it is, each line once."""
    return list(dict.fromkeys(line for record in records for line in _lines(record)))


def run_notices(records: Sequence[Record]) -> list[str]:
    """What runs remark of themselves, each line once."""
    return list(dict.fromkeys(f"harness {r.labels['harness']}: {line}" for r in records for line in r.remarks))


def _lines(record: Record) -> Iterator[str]:
    for component, samples, share in _listed(record.samples):
        batch = record.config["global_batch"]
        name = f"workload {record.labels['workload']}" + (f", component {component}" if component else "")
        listed, truncated, dropped = (int(samples[each]) for each in ("listed", "truncated", "dropped"))
        if truncated or dropped:
            parts = [f"{count} {done}" for count, done in ((truncated, "truncated"), (dropped, "dropped")) if count]
            yield (
                f"{name}: of {listed + dropped} rows {' and '.join(parts)}, longer than the context of "
                f"model {record.labels['model']}"
            )
        if listed < share * batch:
            part = f"{100 * share:.3g}% of " if component else ""
            yield (
                f"{name}: {listed} row{'s' if listed > 1 else ''} for {part}a global batch of {batch}: every row is "
                f"used {share * batch / listed:.1f} times an iteration on average"
            )


def _listed(samples: Counts, component: str = "", share: float = 1.0) -> Iterator[tuple[str, dict[str, float], float]]:
    """Components by their path, empty for a workload that is none, with their counts and their share of all samples."""
    numbers = {name: value for name, value in samples.items() if not isinstance(value, Mapping)}
    share *= numbers.get("share", 1.0)
    if "listed" in numbers:
        yield component, numbers, share
    for name, value in samples.items():
        if isinstance(value, Mapping):
            yield from _listed(value, f"{component}.{name}".lstrip("."), share)
