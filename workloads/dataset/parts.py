"""Parts of a trace on disk, one for each shard that has been scanned, and the trace that they make up."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from .interface import BadSampleError
from .measure import Sizes
from .text import count_tokens

# Where a file says how it came about.
METADATA_KEY = b"entrain_bench.scan"
# Bad samples that are listed; the others are counted.
MAX_LISTED = 20
ROW_GROUP = 131_072
_BATCH = 1024
_FIELDS: Mapping[str, pa.DataType] = {
    "sample_id": pa.string(),
    "text_chars": pa.int32(),
    "text_tokens": pa.int32(),
    "n_images": pa.int32(),
    "image_widths": pa.list_(pa.int32()),
    "image_heights": pa.list_(pa.int32()),
    "audio_seconds": pa.float64(),
    "video_seconds": pa.float64(),
}


@dataclass(slots=True)
class BadSamples:
    """Samples that were left out, counted by reason, and the first of them: name, the data's key, what is wrong."""

    counts: Counter[str] = field(default_factory=Counter)
    listed: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, name: str, key: str, error: BadSampleError) -> None:
        """Count one more."""
        self.counts[error.reason] += 1
        if len(self.listed) < MAX_LISTED:
            self.listed.append((_plain(name), _plain(key), _plain(str(error))))

    def merge(self, other: BadSamples) -> None:
        """Count those of another part, too."""
        self.counts.update(other.counts)
        self.listed += other.listed[: MAX_LISTED - len(self.listed)]

    def values(self) -> dict[str, Any]:
        """As JSON holds it; reasons in the order of their names."""
        return {"counts": dict(sorted(self.counts.items())), "listed": self.listed}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> BadSamples:
        """From ``values``."""
        return cls(Counter(values["counts"]), [tuple(each) for each in values["listed"]])


class Part:
    """Rows of one shard, kept in memory as the compressed file that they become."""

    def __init__(self, tokenizer: str | None) -> None:
        self._tokenizer = tokenizer
        self._schema = schema_of(tokenizer)
        self._buffer = io.BytesIO()
        self._writer = pq.ParquetWriter(self._buffer, self._schema)
        self._rows: list[tuple[str, Sizes]] = []
        self.num_samples = 0
        self.bad = BadSamples()

    def add(self, name: str, sizes: Sizes) -> None:
        """One more row."""
        self._rows.append((name, sizes))
        self.num_samples += 1
        if len(self._rows) == _BATCH:
            self._flush()

    def finish(self) -> bytes:
        """The file."""
        self._flush()
        self._writer.add_key_value_metadata({METADATA_KEY: json.dumps(self.bad.values())})
        self._writer.close()
        return self._buffer.getvalue()

    def _flush(self) -> None:
        if not self._rows:
            return
        sizes = [row for _, row in self._rows]
        columns: dict[str, Sequence[object]] = {
            "sample_id": [name for name, _ in self._rows],
            "text_chars": [row.text_chars for row in sizes],
            "n_images": [row.num_images for row in sizes],
            "image_widths": [row.widths for row in sizes],
            "image_heights": [row.heights for row in sizes],
            "audio_seconds": [row.audio_seconds for row in sizes],
            "video_seconds": [row.video_seconds for row in sizes],
        }
        if self._tokenizer is not None:
            columns["text_tokens"] = count_tokens([row.texts for row in sizes], self._tokenizer)
        self._writer.write_table(pa.table(columns, self._schema))
        self._rows.clear()


def schema_of(tokenizer: str | None) -> pa.Schema:
    """Columns of a trace; tokens if they were counted."""
    return pa.schema([(name, kind) for name, kind in _FIELDS.items() if name != "text_tokens" or tokenizer])


def read_bad(path: Path) -> tuple[int, BadSamples]:
    """Rows of a part, and what was left out of it."""
    metadata = pq.read_metadata(path)
    return metadata.num_rows, BadSamples.of(json.loads(metadata.metadata[METADATA_KEY]))


def read_scan(path: Path) -> dict[str, Any] | None:
    """How a trace came about, if it is one that was scanned."""
    try:
        text = (pq.read_metadata(path).metadata or {}).get(METADATA_KEY)
        return None if text is None else dict(json.loads(text))
    except (pa.ArrowException, OSError, ValueError):
        return None


def count_items(path: Path) -> dict[str, int]:
    """Texts, images, sounds and videos of a trace."""
    columns = {"texts": "text_chars", "images": "n_images", "sounds": "audio_seconds", "videos": "video_seconds"}
    found = dict.fromkeys(columns, 0)
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(ROW_GROUP, columns=[*columns.values()]):
            for kind, name in columns.items():
                values = batch.column(name)
                found[kind] += int(pc.sum(values if kind == "images" else pc.greater(values, 0)).as_py() or 0)
    return found


def write_trace(file: IO[bytes], parts: Sequence[Path], tokenizer: str | None, scan: Mapping[str, Any]) -> None:
    """Write parts one below the other, with how they came about; the bytes follow from the arguments alone."""
    schema = schema_of(tokenizer)
    schema = schema.with_metadata({METADATA_KEY: json.dumps(scan, sort_keys=True)})
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for rows in _groups(parts, schema):
            writer.write_table(rows, row_group_size=ROW_GROUP)


def _groups(parts: Sequence[Path], schema: pa.Schema) -> Iterator[pa.Table]:
    held = list[pa.RecordBatch]()
    rows = 0
    for part in parts:
        with pq.ParquetFile(part) as file:
            for batch in file.iter_batches(ROW_GROUP):
                while rows + len(batch) >= ROW_GROUP:
                    cut = ROW_GROUP - rows
                    yield _table([*held, batch.slice(0, cut)], schema)
                    batch = batch.slice(cut)
                    held = []
                    rows = 0
                if len(batch):
                    held.append(batch)
                    rows += len(batch)
    if held:
        yield _table(held, schema)


def _table(batches: Sequence[pa.RecordBatch], schema: pa.Schema) -> pa.Table:
    return pa.Table.from_batches([batch.cast(schema) for batch in batches], schema).combine_chunks()


def _plain(text: str) -> str:
    """A text that a terminal shows as it is."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:160])
