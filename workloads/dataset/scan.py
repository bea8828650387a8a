"""Scan a dataset to a shape trace, shard by shard, in processes or on Ray. Scans resume and are reproducible."""

import errno
import hashlib
import io
import json
import math
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from entrain_bench.base.errors import ExecutionError, UserError, require
from entrain_bench.base.files import remove_partial, stream_atomically, write_atomically
from entrain_bench.run.parallel import Died, RayCluster, num_processes, run_parallel

from ..budget import BUDGET
from .fields import RawSample
from .formats import FileSource, Source
from .media import header
from .report import ScanReport, sampling_errors
from .source import BadSampleError, Limits, Reason, Shard
from .tokenizers import token_ids, tokenizer_version

# Part of every digest: raise it if the scan changes, so that earlier parts are not reused.
FORMAT = 11
PROCESSES = "processes"
RAY = "ray"
# Where a file says how it was made.
METADATA_KEY = b"entrain_bench.scan"
# Rows from which on shards are drawn at random, and the seed.
MAX_ROWS = 200_000
_SEED = 0
# Kana, ideographs of Chinese and Japanese, and Hangul; with their punctuation and full-width forms.
_CJK = re.compile(r"[\u3000-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uff00-\uffef]")
_COLUMNS: Mapping[str, pa.DataType] = {
    "sample_id": pa.string(),
    "text_chars": pa.int32(),
    "text_cjk": pa.int32(),
    "text_tokens": pa.int32(),
    "n_images": pa.int32(),
    "image_widths": pa.list_(pa.int32()),
    "image_heights": pa.list_(pa.int32()),
    "audio_seconds": pa.list_(pa.float64()),
    "video_seconds": pa.list_(pa.float64()),
    # In a part: of the shard's rows. All null if rows before are not known.
    "dataset_row": pa.int64(),
}
type Advance = Callable[[int, int, int], None]


def measure(sample: RawSample, limits: Limits) -> dict[str, Any]:
    """Return the sizes of a sample by the headers of its media, as in a row of a trace.

    The last sides are those of its videos' frames, 0 if unknown. ``BadSampleError`` if it cannot be in a trace.
    """
    chars = sum(map(len, sample.texts))
    limits.check("text_chars", chars, f"{chars} characters")
    limits.check("media", sample.num_media, f"{sample.num_media} media")
    images = [header("images", medium, limits) for medium in sample.images]
    videos = [header("video", medium, limits) for medium in sample.video]
    if not (chars or sample.num_media):
        raise BadSampleError(Reason.EMPTY)
    return {
        "text_chars": chars,
        "text_cjk": sum(len(_CJK.findall(text)) for text in sample.texts if not text.isascii()),
        "n_images": len(images),
        "image_widths": [each.width for each in (*images, *videos)],
        "image_heights": [each.height for each in (*images, *videos)],
        "audio_seconds": [header("audio", medium, limits).seconds for medium in sample.audio],
        "video_seconds": [video.seconds for video in videos],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """Options of a scan; `entrain-bench trace --help` explains them."""

    source: Source
    limits: Limits = field(default_factory=Limits)
    tokenizer: str | None = None
    timeout_s: float = 60.0
    max_rows: int | None = MAX_ROWS
    engine: str = PROCESSES
    workers: int | None = None
    ray_address: str | None = None

    def __post_init__(self) -> None:
        require(self.engine in (PROCESSES, RAY), "engine", self.engine, f"{PROCESSES} or {RAY}")
        require(self.workers is None or self.workers >= 1, "workers", self.workers, "at least 1, or null")
        require(self.max_rows is None or self.max_rows >= 1, "max_rows", self.max_rows, "at least 1, or null")
        require(0.1 <= self.timeout_s <= 1e6, "timeout_s", self.timeout_s, "from 0.1 to 1e6")

    def run(self, output: Path, advance: Advance = lambda *_: None) -> ScanReport:
        """Scan all shards that were not scanned before, or as many random ones as have ``max_rows``; write the trace.

        Finished shards are kept in ``<output>.parts`` until the trace is written. Equal scans are reused.

        ``advance`` is called for each finished shard with the number of shards, its samples, and its left-out samples.
        ``UserError`` for missing data and data without a valid sample, ``ExecutionError`` for unreadable shards.
        """
        earlier = read_scan(output)
        if output.exists() and earlier is None:
            raise UserError(f"output={output}: exists, but is not a trace of a scan. Remove it or choose another name")
        source = {"kind": type(self.source).__name__, **asdict(self.source)}
        where = f"source.path={source.get('path')}"
        shards = self.source.shards()
        if not shards:
            raise UserError(f"{where}: has no files to scan")
        settings = {
            "source": source,
            "limits": asdict(self.limits),
            "tokenizer_version": tokenizer_version(self.tokenizer),
        }
        digests = [_digest([FORMAT, settings, asdict(shard)]) for shard in shards]
        whole = _digest([*digests, self.max_rows])
        if earlier and earlier.get("digest") == whole:
            return ScanReport(**earlier["tally"] | {"again": True})
        folder = output.with_name(f"{output.name}.parts")
        folder.mkdir(parents=True, exist_ok=True)
        remove_partial(folder)
        pairs = zip(shards, digests, strict=True)
        reports = self._scan([ShardTask(self, shard, folder / f"{digest}.parquet") for shard, digest in pairs], advance)
        report = sum(reports.values(), ScanReport(all_shards=len(shards)))
        if len(reports) < len(shards):
            report.errors = sampling_errors([*reports.values()], len(shards))
        try:
            self._check(report, where)
        except UserError:
            shutil.rmtree(folder)
            raise
        if isinstance(self.source, FileSource):
            report.unread = dict(self.source.unread())
        made = {
            "digest": whole,
            "entrain_bench": version("entrain-bench"),
            "files": {shard.label: shard.version for shard in shards},
            "tally": asdict(report),
            "tokenizer": self.tokenizer,
            **settings,
        }
        schema = self.schema.with_metadata({METADATA_KEY: json.dumps(made, sort_keys=True)})

        starts = accumulate((each.num_rows for each in reports.values()), initial=0)
        is_whole = len(reports) == len(shards) and Reason.FILE not in report.counts
        bases = [start if is_whole else None for start in starts]

        def write(file: IO[bytes]) -> None:
            with pq.ParquetWriter(file, schema, compression="zstd") as writer:
                for part, base in zip(reports, bases, strict=False):
                    table = pq.read_table(part)
                    rows = pc.add(table["dataset_row"], pa.scalar(base, pa.int64()))
                    writer.write_table(
                        table.drop_columns("dataset_row").append_column("dataset_row", rows).cast(schema)
                    )

        stream_atomically(output, write)
        shutil.rmtree(folder)
        return report

    def _check(self, report: ScanReport, where: str) -> None:
        """Raise ``UserError`` for data that the scan does not understand, and data without a valid sample."""
        if isinstance(self.source, Source):
            report.refuse(where, self.source)
        if not report.samples:
            reasons = ", ".join(f"{many} {reason}" for reason, many in sorted(report.counts.items()))
            first = next((f". First: {name}: {what}" for name, what in report.listed), "")
            raise UserError(f"{where}: has no valid sample ({reasons or 'it is empty'}){first}")

    def _scan(self, tasks: Sequence["ShardTask"], advance: Advance) -> dict[Path, ScanReport]:
        """Scan the shards that have no part yet, and return the parts to take, in the order of the data.

        With ``max_rows``, shards come in random order, and the first that have as many rows are taken. More may be
        scanned by then, because several are scanned at the same time. ``ExecutionError`` for unreadable shards.
        """
        cluster = RayCluster(self.ray_address, "engine=ray") if self.engine == RAY else None
        processes = self.workers or (-1 if cluster else num_processes())
        most = self.max_rows or math.inf
        order = [*tasks]
        if self.max_rows:
            order = [tasks[number] for number in np.random.default_rng(_SEED).permutation(len(tasks)).tolist()]
        reports = dict[Path, ScanReport]()
        failures = list[str]()
        total = 0

        def note(task: ShardTask, report: ScanReport) -> None:
            nonlocal total
            reports[task.part] = report
            total += report.num_rows
            wanted = max(len(reports), len(reports) * most / max(1, total))
            advance(math.ceil(min(len(tasks), wanted)), report.samples, report.num_rows - report.samples)

        def missing() -> Iterator[ShardTask]:
            for task in order:
                if total >= most:
                    return
                if earlier := read_scan(task.part):
                    note(task, ScanReport(**earlier["tally"]))
                else:
                    yield task

        for task, result in run_parallel(scan_shard, missing(), processes, cluster):
            if isinstance(result, ScanReport):
                note(task, result)
            else:
                slow = f"; perhaps a sample took longer than timeout_s={self.timeout_s:g}"
                failures.append(f"{task.shard.label}: {result}{slow if isinstance(result, Died) else ''}")
        if failures:
            raise ExecutionError(
                f"{len(failures)} of {len(tasks)} shards could not be scanned ({failures[0]}). "
                "The other shards are kept. To resume, run the same command"
            )
        done = [task.part for task in order if task.part in reports]
        before = accumulate((reports[part].num_rows for part in done), initial=0)
        taken = {part for part, rows in zip(done, before, strict=False) if rows < most}
        return {task.part: reports[task.part] for task in tasks if task.part in taken}

    @property
    def schema(self) -> pa.Schema:
        """Columns of the trace; tokens if they are counted."""
        return pa.schema([(name, kind) for name, kind in _COLUMNS.items() if name != "text_tokens" or self.tokenizer])


@dataclass(frozen=True, slots=True)
class ShardTask:
    """A shard to be scanned to a part."""

    scan: Scan
    shard: Shard
    part: Path


def scan_shard(task: ShardTask) -> ScanReport | str:
    """Read a shard and write its part, with left-out samples; return its counts, or the reason why there is no part."""
    report = ScanReport(shards=1)
    try:
        rows = _read(task, report)
        content = io.BytesIO()
        metadata = {METADATA_KEY: json.dumps({"tally": asdict(report)})}
        pq.write_table(pa.Table.from_pylist(rows, task.scan.schema.with_metadata(metadata)), content)
        write_atomically(task.part, content.getvalue())
    except (UserError, OSError) as error:
        return str(error)
    return report


def _read(task: ShardTask, report: ScanReport) -> list[dict[str, Any]]:
    """Return a shard's rows; an error of a sample costs the sample, an error of the file the rest of the file.

    The alarm's signal ends this process if a sample takes too long, even within a library.
    """
    scan = task.scan
    rows = list[dict[str, Any]]()
    number = task.shard.first
    try:
        with BUDGET.held():
            folder = scan.source.folder(task.shard)
            signal.setitimer(signal.ITIMER_REAL, scan.timeout_s)
            for row in scan.source.rows(task.shard, scan.limits):
                name = f"{task.shard.label}:{number}"
                number += 1
                signal.setitimer(signal.ITIMER_REAL, scan.timeout_s)
                try:
                    sample = scan.source.sample(row, folder)
                    report.find(name, row, sample)
                    sizes = {"sample_id": name, "dataset_row": number - 1 - task.shard.first}
                    sizes |= measure(sample, scan.limits)
                    if scan.tokenizer:
                        sizes["text_tokens"] = len(token_ids(sample, scan.tokenizer))
                except BadSampleError as error:
                    report.leave_out(name, error)
                else:
                    rows.append(sizes)
    # The libraries that read files raise anything on damaged bytes.
    except Exception as error:
        # The machine and the network give other error numbers; the file may be readable later.
        is_passing = isinstance(error, OSError) and error.errno not in (None, errno.EINVAL)
        if is_passing or isinstance(error, UserError | ConnectionError | TimeoutError):
            raise
        what = " ".join(f"{type(error).__name__}: {error}".split())
        bad = error if isinstance(error, BadSampleError) else BadSampleError(Reason.FILE, what)
        report.leave_out(f"{task.shard.label}:{number} and later", bad)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    report.keep(rows)
    return rows


def read_scan(path: Path) -> dict[str, Any] | None:
    """Return how a trace was made if a scan made it."""
    try:
        text = (pq.read_metadata(path).metadata or {}).get(METADATA_KEY)
        return None if text is None else dict(json.loads(text))
    except (pa.ArrowException, OSError, ValueError):
        return None


def _digest(values: object) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:32]
