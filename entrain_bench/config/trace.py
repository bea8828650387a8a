"""The keys of ``entrain-bench trace``, and who scans what: a source and limits, chosen in experiments/trace.yaml."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from entrain_bench.base.errors import UserError
from entrain_bench.config.grammar import own
from entrain_bench.config.overrides import is_inside, parse, top_of, with_value
from entrain_bench.config.sources import add_config_dir, compose_values
from entrain_bench.config.targets import TARGET, check_targets, instantiate

CONFIG_NAME = "trace"
CHOSEN = ("source", "limits", "scan")
RUN_KEYS = ("model", "cluster", "layout", "workload", "global_batch", "microbatch_size")


@dataclass(frozen=True, slots=True)
class TraceKeys:
    """Own keys; who scans checks their ranges."""

    output: str = own("trace.parquet", "file of the trace; a summary goes next to it (trace.md)")
    tokenizer: str | None = own(
        None,
        "path of a tokenizer.json; bytes: one token per UTF-8 byte; null: count characters only",
    )
    engine: str = own(
        "processes", "processes: on this machine; ray: on a Ray cluster whose machines have the same folders"
    )
    workers: int | None = own(
        None, "shards scanned at the same time; null: one per core up to 8, or all CPUs of the cluster"
    )
    ray_address: str | None = own(None, "host:port of a running Ray cluster; null: start one on this machine")
    timeout_s: float = own(60.0, "seconds per sample; a sample that takes longer fails its shard")


# The report of a scan (``ScanReport`` of the workloads, which the suite does not import).
type Scanned = Any


@dataclass(frozen=True, slots=True)
class TraceCommand:
    """A scan, which tells a function of shards in all, a shard's samples and those left out; and what it is of."""

    scan: Callable[[Path, Callable[[int, int, int], None]], Scanned]
    output: Path
    source: Mapping[str, Any]
    run: tuple[str, ...]


def compose_trace(keys: TraceKeys, overrides: Sequence[str], config_dir: str | None) -> TraceCommand:
    """The scan that keys and overrides describe; ``UserError`` for whatever is wrong with one."""
    add_config_dir(config_dir)
    mine = [text for text in overrides if top_of(parse(text)) in CHOSEN]
    parsed = [parse(text) for text in mine]
    inside = [override for override in parsed if is_inside(override)]
    values = compose_values([str(one.input_line) for one in parsed if one not in inside], config_dir, CONFIG_NAME)
    for override in inside:
        values = with_value(values, override)
    check_targets(values)
    missing = [key for key, value in values["source"].items() if value == MISSING]
    if missing:
        raise UserError(f"source.{missing[0]}: missing; {values['source'][TARGET].rpartition('.')[2]} needs it")
    options = {**asdict(keys), "limits": values["limits"]}
    output = Path(options.pop("output")).expanduser()
    source = instantiate(values["source"], "source", "shards")
    scanner = instantiate({**values["scan"], **options}, "scan", "run", source=source)
    return TraceCommand(scanner.run, output, values["source"], tuple(text for text in overrides if text not in mine))
