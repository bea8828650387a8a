"""The configuration of ``entrain-bench trace``: a source of data, and the options of experiments/trace.yaml."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from entrain_bench.base.errors import UserError
from entrain_bench.config.command_line import add_config_dir, in_tree, one_line_errors
from entrain_bench.config.instantiate import instantiate
from entrain_bench.config.schema import plain_values

CONFIG_NAME = "trace"
# Keys of a run that change what a summary says.
RUN_KEYS = ("model", "cluster", "layout", "workload", "global_batch", "microbatch_size")


@dataclass
class TraceSchema:
    """Keys and their types; values are in experiments/trace.yaml. Hydra rejects others and wrong types."""

    source: Any = MISSING
    output: str = MISSING
    tokenizer: str | None = MISSING
    engine: str = MISSING
    workers: int | None = MISSING
    ray_address: str | None = MISSING
    timeout_s: float = MISSING
    limits: Any = MISSING
    scan: Any = MISSING


class Scanned(Protocol):
    """What a scan found.

    Attributes:
        samples: rows of the trace.
        shards: scanned.
        items: texts, images, sounds and videos, by these names.
        counts: of what was left out, by reason.
        listed: the first of them: name, what the data calls it, what is wrong.
        again: whether nothing had to be scanned.
    """

    @property
    def samples(self) -> int: ...  # noqa: D102
    @property
    def shards(self) -> int: ...  # noqa: D102
    @property
    def items(self) -> Mapping[str, int]: ...  # noqa: D102
    @property
    def counts(self) -> Mapping[str, int]: ...  # noqa: D102
    @property
    def listed(self) -> Sequence[tuple[str, str, str]]: ...  # noqa: D102
    @property
    def again(self) -> bool: ...  # noqa: D102


class Scanner(Protocol):
    """Who scans: an outside part, found by its ``_target_``."""

    def run(self, output: Path, advance: Callable[[int, int, int], None]) -> Scanned:
        """Scan to a trace; ``advance`` is told of every shard: shards in all, its samples, those left out."""
        ...


@dataclass(frozen=True, slots=True)
class TraceCommand:
    """What ``entrain-bench trace`` is to do.

    Attributes:
        scanner: who scans.
        output: the trace.
        source: of the data, as configured.
        run: overrides of the run that the summary is of.
    """

    scanner: Scanner
    output: Path
    source: Mapping[str, Any]
    run: tuple[str, ...]


def compose_trace(overrides: Sequence[str], config_dir: str | None) -> TraceCommand:
    """The scan that overrides describe.

    Args:
        overrides: ``key=value``; those of keys that a scan does not have are of the run that its summary is of.
        config_dir: a folder of the user's with further sources.

    Raises:
        UserError: for unknown keys, unknown sources, wrong types and values out of range.
    """
    ConfigStore.instance().store(name="trace_schema", node=TraceSchema)
    search = add_config_dir(config_dir)
    keys = TraceSchema.__dataclass_fields__
    mine = [text for text in overrides if _group(text) in keys]
    run = tuple(text for text in overrides if _group(text) not in keys)
    with one_line_errors([*search, *mine], CONFIG_NAME, keys), in_tree():
        values = plain_values(hydra.compose(CONFIG_NAME, overrides=[*search, *mine]))
    missing = [key for key, value in values["source"].items() if value == MISSING]
    if missing:
        raise UserError(f"source.{missing[0]}: missing; {values['source']['_target_'].rpartition('.')[2]} needs it")
    source = instantiate(values["source"], "source", "shards")
    options = {name: values[name] for name in ("tokenizer", "engine", "workers", "ray_address", "timeout_s", "limits")}
    scanner = instantiate({**values["scan"], **options}, "scan", "run", source=source)
    return TraceCommand(scanner, Path(values["output"]).expanduser(), values["source"], run)


def _group(text: str) -> str:
    """The top-level key of an override."""
    return re.split(r"[=./@]", text.lstrip("+~"))[0]
