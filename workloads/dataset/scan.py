"""Scan a dataset to a shape trace, shard by shard, in processes or on Ray. Scans resume and are reproducible."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from entrain_bench.base.errors import ExecutionError, UserError, require
from entrain_bench.base.files import remove_partial, stream_atomically
from entrain_bench.run.parallel import Died, RayCluster, num_processes, run_parallel

from .interface import Limits, Shard, Source
from .known import recognised
from .parts import BadSamples, count_items, read_bad, read_scan, write_trace
from .shard import Job, Scanned, died_at, scan_shard
from .text import tokenizer_version

# Part of every digest: raise it if the scan changes, so that earlier parts are not reused.
FORMAT = 3
PROCESSES = "processes"
RAY = "ray"
# Samples of one shard that may kill a process before the shard counts as failed.
_MAX_DEATHS = 16
type Advance = Callable[[int, int, int], None]


@dataclass(frozen=True, slots=True)
class ScanReport:
    """Result of a scan.

    Attributes:
        path: the trace.
        samples: rows of the trace.
        shards: number of shards.
        bad: samples that were left out.
        items: number of items by modality.
        again: whether an earlier scan of the same data and settings was reused.
    """

    path: Path
    samples: int
    shards: int
    bad: BadSamples
    items: Mapping[str, int]
    again: bool = False

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of samples that were left out, by reason."""
        return self.bad.counts

    @property
    def listed(self) -> Sequence[tuple[str, str, str]]:
        """The first of them: name, key in the data, problem."""
        return self.bad.listed


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """Options of a scan; `entrain-bench trace --help` explains them."""

    source: Source
    limits: Limits = field(default_factory=Limits)
    tokenizer: str | None = None
    timeout_s: float = 60.0
    engine: str = PROCESSES
    workers: int | None = None
    ray_address: str | None = None

    def __post_init__(self) -> None:
        require(self.engine in (PROCESSES, RAY), "engine", self.engine, f"{PROCESSES} or {RAY}")
        require(self.workers is None or self.workers >= 1, "workers", self.workers, "at least 1, or null")
        require(0.1 <= self.timeout_s <= 1e6, "timeout_s", self.timeout_s, "from 0.1 to 1e6")

    def run(self, output: Path, advance: Advance = lambda *_: None) -> ScanReport:
        """Scan all shards that were not scanned before, and write the trace.

        Finished shards are kept in ``<output>.parts`` until the trace is written. If a trace of the same files and
        settings exists, nothing is scanned.

        Args:
            output: the trace; with Ray, in a folder that all machines share.
            advance: called for each finished shard with the number of shards, its samples, and its left-out samples.

        Raises:
            UserError: for missing data, bad settings, and data without a valid sample.
            ExecutionError: if a shard could not be read; finished shards are kept.
        """
        if output.exists() and read_scan(output) is None:
            raise UserError(f"output={output}: exists, but is not a trace of a scan. Remove it or choose another name")
        if (named := recognised(self.source)) is not self.source:
            return replace(self, source=named).run(output, advance)
        shards = list(self.source.shards())
        if not shards:
            raise UserError(f"source: {describe(self.source)} has no files to scan. Check source.path")
        version_of = tokenizer_version(self.tokenizer)
        # The inputs of each part.
        common = [FORMAT, describe(self.source), asdict(self.limits), version_of]
        digests = [_digest([common, shard.label, shard.first, shard.version, shard.part]) for shard in shards]
        whole = _digest([*digests])
        if (found := read_scan(output)) and found["digest"] == whole:
            bad = BadSamples.of(found["bad"])
            return ScanReport(output, found["samples"], len(shards), bad, count_items(output), again=True)
        folder = output.with_name(f"{output.name}.parts")
        folder.mkdir(parents=True, exist_ok=True)
        remove_partial(folder)
        parts = [folder / f"{digest}.parquet" for digest in digests]
        self._scan(shards, parts, advance)
        samples = 0
        bad = BadSamples()
        for part in parts:
            of_part, bad_of_part = read_bad(part)
            samples += of_part
            bad.merge(bad_of_part)
        if not samples:
            reasons = ", ".join(f"{many} {reason}" for reason, many in sorted(bad.counts.items()))
            first = next((f". First: {name} ({key}): {what}" for name, key, what in bad.listed), "")
            raise UserError(f"source: {describe(self.source)} has no valid sample ({reasons or 'it is empty'}){first}")
        scan = {
            "digest": whole,
            "entrain_bench": version("entrain-bench"),
            "source": describe(self.source),
            "limits": asdict(self.limits),
            "tokenizer": self.tokenizer,
            "tokenizer_version": version_of,
            "files": {shard.label: shard.version for shard in shards},
            "shards": len(shards),
            "samples": samples,
            "bad": bad.values(),
        }
        stream_atomically(output, lambda file: write_trace(file, parts, self.tokenizer, scan))
        shutil.rmtree(folder)
        return ScanReport(output, samples, len(shards), bad, count_items(output))

    def _scan(self, shards: Sequence[Shard], parts: Sequence[Path], advance: Advance) -> None:
        """Scan the shards that have no part yet."""
        waiting = list[Job]()
        failures = list[str]()
        for shard, part in zip(shards, parts, strict=True):
            if part.exists():
                samples, bad = read_bad(part)
                advance(len(shards), samples, bad.counts.total())
            else:
                waiting.append(Job(self, shard, part))
        while waiting:
            results = self._worked_off(waiting)
            waiting = []
            for job, result in results:
                if isinstance(result, Died):
                    number = died_at(job.journal)
                    if number in job.skip or len(job.skip) >= _MAX_DEATHS or number < job.shard.first:
                        failures.append(f"{job.shard.label}: {result}")
                        continue
                    what = f"{result}, or took longer than timeout_s={self.timeout_s:g}"
                    waiting.append(replace(job, skip={**job.skip, number: what}))
                elif result.failure:
                    failures.append(result.failure)
                else:
                    advance(len(shards), result.samples, result.bad)
        if failures:
            raise ExecutionError(
                f"{len(failures)} of {len(shards)} shards could not be scanned ({failures[0]}). "
                "The other shards are kept. To resume, run the same command"
            )

    def _worked_off(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Scanned | Died]]:
        cluster = RayCluster(self.ray_address, "engine=ray") if self.engine == RAY else None
        processes = self.workers or (-1 if cluster else num_processes())
        return run_parallel(scan_shard, jobs, processes, cluster)


def describe(source: object) -> dict[str, Any]:
    """Return a source's class and settings as plain values."""
    values: dict[str, Any] = asdict(source) if is_dataclass(source) and not isinstance(source, type) else {}
    return {"kind": type(source).__name__, **values}


def _digest(values: object) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:32]
