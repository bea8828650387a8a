"""Scan a dataset to a shape trace, shard by shard, in processes or on Ray. Scans resume and are reproducible."""

import errno
import hashlib
import io
import json
import math
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
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
from .conventions import KINDS
from .errors import BadSampleError, Reason
from .fields import RawSample
from .formats import FileSource
from .media import header
from .source import Limits, Shard, Source
from .tokenizers import token_ids, tokenizer_version
from .uncounted import Uncounted

# Part of every digest: raise it if the scan changes, so that earlier parts are not reused.
FORMAT = 9
PROCESSES = "processes"
RAY = "ray"
# Where a file says how it was made.
METADATA_KEY = b"entrain_bench.scan"
# Left-out samples that are listed; all are counted.
MAX_LISTED = 20
# Rows from which on shards are drawn at random, and the seed.
MAX_ROWS = 200_000
_SEED = 0
ITEMS = ("texts", "images", "sounds", "videos")
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
}
# Means whose errors a sample states.
_MEASURES = {"text": "text_chars", "images": "n_images", "seconds of audio": "audio_seconds"} | {
    "seconds of video": "video_seconds"
}
_TIMED = ("audio_seconds", "video_seconds")
type Advance = Callable[[int, int, int], None]


def measure(sample: RawSample, limits: Limits) -> dict[str, Any]:
    """Return the sizes of a sample by the headers of its media, as in a row of a trace.

    The last sides are those of its videos' frames, 0 if unknown. ``BadSampleError`` if it cannot be in a trace.
    """
    chars = sum(map(len, sample.texts))
    limits.check("text_chars", chars, f"{chars} characters")
    limits.check("media", sample.num_media, f"{sample.num_media} media")
    images, sounds, videos = (
        [header(kind, medium, limits) for medium in media]
        for kind, media in zip(KINDS, (sample.images, sample.audio, sample.video), strict=True)
    )
    if not (chars or sample.num_media):
        raise BadSampleError(Reason.EMPTY)
    return {
        "text_chars": chars,
        "text_cjk": sum(len(_CJK.findall(text)) for text in sample.texts if not text.isascii()),
        "n_images": len(images),
        "image_widths": [each.width for each in (*images, *videos)],
        "image_heights": [each.height for each in (*images, *videos)],
        "audio_seconds": [sound.seconds for sound in sounds],
        "video_seconds": [video.seconds for video in videos],
    }


@dataclass(frozen=True, slots=True)
class ScanReport:
    """The result of a scan or of a shard: rows of the trace, and numbers of texts, images, sounds and videos."""

    samples: int = 0
    items: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(ITEMS, 0))
    # Left-out samples by reason, and of the first ones name and problem.
    counts: Mapping[str, int] = field(default_factory=dict)
    listed: Sequence[Sequence[str]] = ()
    shards: int = 0
    # Whether an earlier scan of the same data and settings was reused.
    again: bool = False
    uncounted: Uncounted = field(default_factory=Uncounted)
    # Endings of files next to those that are read, and how many.
    unread: Mapping[str, int] = field(default_factory=dict)
    # Shards of the data, and the largest errors of means at 95% confidence as shares, if some were drawn.
    all_shards: int = 0
    errors: Mapping[str, float] = field(default_factory=dict)

    def __add__(self, other: "ScanReport") -> "ScanReport":
        return ScanReport(
            self.samples + other.samples,
            {name: self.items[name] + other.items[name] for name in ITEMS},
            dict(Counter(self.counts) + Counter(other.counts)),
            [*self.listed, *other.listed][:MAX_LISTED],
            self.shards + other.shards,
            uncounted=self.uncounted + other.uncounted,
        )

    @classmethod
    def read(cls, path: Path) -> "ScanReport":
        """Read the report in a shard's part, or in a trace."""
        values = json.loads(pq.read_metadata(path).metadata[METADATA_KEY])["tally"]
        return cls(**values | {"uncounted": Uncounted(**values["uncounted"])})


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
        shards = list(self.source.shards())
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
            return replace(ScanReport.read(output), again=True)
        folder = output.with_name(f"{output.name}.parts")
        folder.mkdir(parents=True, exist_ok=True)
        remove_partial(folder)
        parts = [folder / f"{digest}.parquet" for digest in digests]
        taken = self._scan([ShardTask(self, *pair) for pair in zip(shards, parts, strict=True)], advance)
        parts = [part for part in parts if part in taken]
        errors = _sampling_errors(parts, len(shards)) if len(parts) < len(shards) else {}
        tally = replace(sum(map(ScanReport.read, parts), ScanReport()), all_shards=len(shards), errors=errors)
        try:
            if isinstance(self.source, Source):
                items = dict(zip(KINDS, (tally.items[name] for name in ITEMS[1:]), strict=True))
                tally.uncounted.refuse(where, self.source, items)
            if not tally.samples:
                reasons = ", ".join(f"{many} {reason}" for reason, many in sorted(tally.counts.items()))
                first = next((f". First: {name}: {what}" for name, what in tally.listed), "")
                raise UserError(f"{where}: has no valid sample ({reasons or 'it is empty'}){first}")
        except UserError:
            shutil.rmtree(folder)
            raise
        if isinstance(self.source, FileSource):
            tally = replace(tally, unread=self.source.unread())
        made: dict[str, Any] = {
            "digest": whole,
            "entrain_bench": version("entrain-bench"),
            "files": {shard.label: shard.version for shard in shards},
            "tally": asdict(tally),
            "tokenizer": self.tokenizer,
            **settings,
        }
        stream_atomically(output, lambda file: self._write(file, parts, made))
        shutil.rmtree(folder)
        return tally

    def _scan(self, tasks: Sequence["ShardTask"], advance: Advance) -> set[Path]:
        """Scan the shards that have no part yet, and return the parts to take.

        With ``max_rows``, shards come in random order, and the first that have as many rows are taken. More may be
        scanned by then, because several are scanned at the same time. ``ExecutionError`` for unreadable shards.
        """
        cluster = RayCluster(self.ray_address, "engine=ray") if self.engine == RAY else None
        processes = self.workers or (-1 if cluster else num_processes())
        most = math.inf if self.max_rows is None else self.max_rows
        order = np.random.default_rng(_SEED).permutation(len(tasks)).tolist() if self.max_rows else range(len(tasks))
        rows = dict[Path, int]()
        total = 0
        failures = list[str]()

        def note(task: ShardTask, result: ScanReport | str) -> None:
            nonlocal total
            if isinstance(result, str):
                failures.append(result)
                return
            bad = sum(result.counts.values())
            rows[task.part] = result.samples + bad
            total += rows[task.part]
            wanted = len(rows) * most / max(1, total)
            advance(math.ceil(min(len(tasks), max(wanted, len(rows)))), result.samples, bad)

        def missing() -> Iterator[ShardTask]:
            for number in order:
                if total >= most:
                    return
                if tasks[number].part.exists():
                    note(tasks[number], ScanReport.read(tasks[number].part))
                else:
                    yield tasks[number]

        for task, result in run_parallel(scan_shard, missing(), processes, cluster):
            note(task, _named(task, result))
        if failures:
            raise ExecutionError(
                f"{len(failures)} of {len(tasks)} shards could not be scanned ({failures[0]}). "
                "The other shards are kept. To resume, run the same command"
            )
        parts = [part for number in order if (part := tasks[number].part) in rows]
        before = accumulate((rows[part] for part in parts), initial=0)
        return {part for part, earlier in zip(parts, before, strict=False) if earlier < most}

    def _write(self, file: IO[bytes], parts: Sequence[Path], made: Mapping[str, Any]) -> None:
        """Write the trace; its bytes depend on the arguments only."""
        schema = self.schema
        for name in _TIMED:
            lists = (pq.read_table(part, columns=[name])[name] for part in parts)
            # Most data have at most one, which a trace states as a number.
            if all((pc.max(pc.list_value_length(column)).as_py() or 0) <= 1 for column in lists):
                schema = schema.set(schema.get_field_index(name), pa.field(name, pa.float64()))
        schema = schema.with_metadata({METADATA_KEY: json.dumps(made, sort_keys=True)})
        with pq.ParquetWriter(file, schema, compression="zstd") as writer:
            for part in parts:
                table = pq.read_table(part)
                for place, name in enumerate(table.column_names):
                    if table[name].type != schema.field(name).type:
                        values = [each[0] if each else None for each in table[name].to_pylist()]
                        table = table.set_column(place, name, pa.array(values, pa.float64()))
                writer.write_table(table.cast(schema))

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


def _named(task: ShardTask, result: ScanReport | str | Died) -> ScanReport | str:
    if isinstance(result, Died):
        slow = f"perhaps a sample took longer than timeout_s={task.scan.timeout_s:g}"
        return f"{task.shard.label}: {result}; {slow}"
    return result


def scan_shard(task: ShardTask) -> ScanReport | str:
    """Read a shard and write its part, with left-out samples; return its counts, or the reason why there is no part."""
    rows = list[dict[str, Any]]()
    counts = Counter[str]()
    listed = list[tuple[str, str]]()
    uncounted = Uncounted()
    try:
        for name, row in _read(task, uncounted):
            if isinstance(row, BadSampleError):
                counts[row.reason] += 1
                if len(listed) < MAX_LISTED:
                    listed.append((_plain(name), _plain(str(row))))
                continue
            rows.append({"sample_id": name, **row})
        table = pa.Table.from_pylist(rows, task.scan.schema)
        tally = ScanReport(len(table), _count_items(table), dict(counts), listed, 1, uncounted=uncounted)
        content = io.BytesIO()
        metadata = {METADATA_KEY: json.dumps({"tally": asdict(tally)})}
        pq.write_table(table.replace_schema_metadata(metadata), content)
        write_atomically(task.part, content.getvalue())
    except UserError as error:
        return str(error)
    except OSError as error:
        return f"{task.shard.label}: {error}"
    return tally


def _read(task: ShardTask, uncounted: Uncounted) -> Iterator[tuple[str, dict[str, Any] | BadSampleError]]:
    """Yield names and rows; an error of a sample costs the sample, an error of the file the rest of the file.

    The alarm's signal ends this process if a sample takes too long, even within a library.
    """
    scan = task.scan
    label = task.shard.label
    number = task.shard.first
    try:
        with BUDGET.held():
            folder = scan.source.folder(task.shard)
            signal.setitimer(signal.ITIMER_REAL, scan.timeout_s)
            for row in scan.source.rows(task.shard, scan.limits):
                name = f"{label}:{number}"
                number += 1
                signal.setitimer(signal.ITIMER_REAL, scan.timeout_s)
                try:
                    sample = scan.source.sample(row, folder)
                    uncounted.add(name, row, sample)
                    sizes = measure(sample, scan.limits)
                    if scan.tokenizer:
                        sizes["text_tokens"] = len(token_ids(sample.texts, scan.tokenizer))
                    yield name, sizes
                except BadSampleError as error:
                    yield name, error
    # The libraries that read files raise anything on damaged bytes.
    except Exception as error:
        # The machine and the network give other error numbers; the file may be readable later.
        is_passing = isinstance(error, OSError) and error.errno not in (None, errno.EINVAL)
        if is_passing or isinstance(error, UserError | ConnectionError | TimeoutError):
            raise
        what = " ".join(f"{type(error).__name__}: {error}".split())
        bad = error if isinstance(error, BadSampleError) else BadSampleError(Reason.FILE, what)
        yield f"{label}:{number} and later", bad
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _sampling_errors(parts: Sequence[Path], total: int) -> dict[str, float]:
    """Return how far means of a sample of shards may be off, as shares, at 95% confidence.

    Shards differ more than rows do, so errors are those of a ratio over shards (Cochran, Sampling Techniques, 6.3),
    with Student's factor. No error is known of one shard.
    """
    from scipy.stats import t

    tables = [pq.read_table(part) for part in parts]
    counts = np.array([len(table) for table in tables], np.float64)
    sums = {
        name: np.array([pc.sum(_flat(table[column])).as_py() or 0 for table in tables], np.float64)
        for name, column in _MEASURES.items()
    }
    many = len(parts)
    errors = dict[str, float]()
    for name, values in sums.items():
        if many > 1 and values.sum() > 0:
            deviations = values - values.sum() / counts.sum() * counts
            variance = (1 - many / total) * many / (many - 1) * (deviations**2).sum()
            errors[name] = float(t.ppf(0.975, many - 1) * np.sqrt(variance) / values.sum())
    return errors


def _flat(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.list_flatten(column) if pa.types.is_list(column.type) else column


def _count_items(table: pa.Table) -> dict[str, int]:
    texts = pc.sum(pc.greater(table["text_chars"], 0)).as_py() or 0
    images = pc.sum(table["n_images"]).as_py() or 0
    timed = [pc.sum(pc.list_value_length(table[name])).as_py() or 0 for name in _TIMED]
    return dict(zip(ITEMS, (texts, images, *timed), strict=True))


def _plain(text: str) -> str:
    """Return a text that a terminal shows unchanged."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:160])


def read_scan(path: Path) -> dict[str, Any] | None:
    """Return how a trace was made if a scan made it."""
    try:
        text = (pq.read_metadata(path).metadata or {}).get(METADATA_KEY)
        return None if text is None else dict(json.loads(text))
    except (pa.ArrowException, OSError, ValueError):
        return None


def _digest(values: object) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:32]
