"""Readers of data: Parquet, JSON arrays and lines, tar files, and streams of the Hugging Face hub's library."""

import hashlib
import json
import logging
import os
import re
import tarfile
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from entrain_bench.base.arrays import IntArray
from entrain_bench.base.errors import UserError

from ..budget import BUDGET
from ..columns import ALL, num_taken
from .source import (
    AUTO,
    BadSampleError,
    Limits,
    RawSample,
    Reason,
    Row,
    Section,
    Shard,
    Source,
    data_files,
    kind_of,
    leaves_root,
    one_line,
    over_budget,
)

# Rows of a shard; a row group is never cut.
_SHARD_ROWS = 4096
# Parquet: rows of a batch, and their bytes by the average row of a row group.
_BATCH_ROWS = 32
_BATCH_BYTES = 4 * 2**20
_BUFFER_BYTES = 2**20
# Bytes that an entry of a list takes at least as an object of Python: a pointer and a short text.
_ENTRY_BYTES = 64
# JSON: bytes that are read at a time, and the longest record: a byte takes up to 32 bytes as Python objects.
_READ_BYTES = 2**20
MAX_RECORD_BYTES = BUDGET.num_bytes // 32
_BOM = b"\xef\xbb\xbf"
_GAP = re.compile("(?:\xef\xbb\xbf)?[\\s,[]*")
# Members about the archive itself, and bytes that a member takes in memory in addition to its content.
_META = re.compile(r"__[^/]*__(?:$|/)")
_MEMBER_BYTES = 2**10

# Places of a file at which reading may start or must stop, and the numbers of the rows there ``[starts + 1]`` each.
type Index = tuple[IntArray, IntArray]


@dataclass(frozen=True, kw_only=True)
class FileSource(Source):
    """Local files whose rows can be read in any order."""

    ENDINGS: ClassVar[Sequence[str]] = ()

    def files(self) -> list[Shard]:
        """Return the files that are taken; ``UserError`` if there are none."""
        return data_files(self.path, self.ENDINGS, self.take)

    @staticmethod
    @abstractmethod
    def index(file: Shard) -> Index:
        """Return where reading a file may start."""

    def shards(self) -> list[Shard]:
        """Return parts of files; ``UserError`` for no files, an array that is no JSON, and a record too long."""
        shards = []
        for file in self.files():
            places, numbers = self.index(file)
            starts = np.unique(numbers[:-1] // _SHARD_ROWS, return_index=True)[1].tolist()
            for start, stop in pairwise([*starts, len(numbers) - 1]):
                part = (int(places[start]), int(places[stop]))
                shards.append(replace(file, first=int(numbers[start]), part=part))
        return shards

    def record(self, file: Shard, number: int, limits: Limits) -> RawSample:
        """Read one sample with its media's content; ``BadSampleError`` if there is none."""
        places, numbers = self.index(file)
        if not 0 <= number < numbers[-1]:
            raise BadSampleError(Reason.FILE, f"{file.label} has no sample {number}")
        start = bisect_right(numbers, number) - 1
        first = int(numbers[start])
        rows = self.rows(replace(file, first=first, part=(int(places[start]), int(places[start + 1]))), limits)
        return self.sample(next(islice(rows, number - first, None)), self.folder(file), content=True)


@dataclass(frozen=True, kw_only=True)
class ParquetSource(FileSource):
    """Rows of Parquet files; images are structs with ``bytes``, or ``path`` below ``root`` (empty: no files)."""

    ENDINGS: ClassVar[Sequence[str]] = (".parquet",)

    root: str = ""

    def folder(self, shard: Shard) -> str:  # noqa: ARG002
        """Return the folder of the files that rows name."""
        return self.root

    @staticmethod
    @lru_cache(maxsize=1024)
    def index(file: Shard) -> Index:
        """Return the row groups."""
        try:
            metadata = pq.read_metadata(file.place)
        except (pa.ArrowException, OSError, UnicodeDecodeError):
            # The scan reports it.
            return np.arange(2), np.zeros(2, np.int64)
        rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        return np.arange(len(rows) + 1), np.cumsum([0, *rows])

    def rows(self, shard: Shard, limits: Limits) -> Iterator[Row]:  # noqa: ARG002
        """Read the rows of a shard; ``BadSampleError`` if a column is missing, or lists are beyond the budget."""
        # Without a buffer it reads a row group's column whole.
        with pq.ParquetFile(shard.place, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
            columns = {field.name: str(field.type) for field in file.schema_arrow}
            names: Sequence[str] = self.names
            blank = dict[str, None]()
            if AUTO in names:
                # Fields are told by their names, texts and content.
                names = [name for name, kind in columns.items() if re.search("string|binary", kind)]
                blank = dict.fromkeys(columns)
            if missing := [name for name in names if name not in columns]:
                raise BadSampleError(Reason.FILE, f"no column {missing[0]}")
            for group in range(*shard.part):
                for batch in _batches(file, group, names):
                    yield from (blank | row for row in batch.to_pylist())


def _batches(file: pq.ParquetFile, group: int, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    metadata = file.metadata.row_group(group)
    chunks = [metadata.column(number) for number in range(metadata.num_columns)]
    values = sum(chunk.num_values for chunk in chunks if chunk.path_in_schema.partition(".")[0] in names)
    # Each row has at least one value of each column; one row may have all the others.
    most = max(0, values - metadata.num_rows * len(names))
    what = f"row group {group + 1}: a row of up to {most:,} list entries (write smaller row groups)"
    BUDGET.ask(most * _ENTRY_BYTES, what, over_budget)
    fit = _BATCH_BYTES * metadata.num_rows // max(1, metadata.total_byte_size)
    rows = min(_BATCH_ROWS, max(1, fit))
    yield from file.iter_batches(rows, row_groups=[group], columns=list(names), use_threads=False)


@dataclass(frozen=True, kw_only=True)
class RecordSource(FileSource):
    """Records of JSON arrays, or of files with one record per line, next to media: LLaVA's files, manifests."""

    ENDINGS: ClassVar[Sequence[str]] = (".json", ".jsonl")
    SPARSE: ClassVar[bool] = True

    root: str = ""

    def folder(self, shard: Shard) -> str:
        """Return the folder of the files that records name."""
        return self.root or str(Path(shard.place).parent)

    @staticmethod
    @lru_cache(maxsize=1024)
    def index(file: Shard) -> Index:
        """Return where records end, in bytes; ``UserError`` for an array that is no JSON, and a record too long."""
        ends = np.array([0, *(end for end, _ in _split(file, 0))], np.int64)
        return ends, np.arange(len(ends))

    def rows(self, shard: Shard, limits: Limits) -> Iterator[Row | BadSampleError]:  # noqa: ARG002
        """Read the records of a shard."""
        start, stop = shard.part
        for end, content in _split(shard, start):
            try:
                yield _parsed(content)
            except BadSampleError as error:
                yield error
            if end >= stop:
                return


def _split(shard: Shard, start: int) -> Iterator[tuple[int, bytes]]:
    """Yield where records end and their content, from an offset at which a record starts.

    ``UserError`` for an array whose elements are no JSON objects, and for a record that is too long.
    """
    with Path(shard.place).open("rb") as file:
        is_array = file.read(4096).removeprefix(_BOM).lstrip().startswith(b"[")
        file.seek(start)
        yield from (_split_array if is_array else _split_lines)(f"source.path={shard.place}", file)


def _split_lines(where: str, file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    while line := file.readline(MAX_RECORD_BYTES):
        if len(line) == MAX_RECORD_BYTES:
            raise UserError(f"{where}: the line that ends at byte {file.tell()} is longer than that")
        if line.removeprefix(_BOM).strip():
            yield file.tell(), line


def _split_array(where: str, file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    decoder = json.JSONDecoder()
    # One character per byte, which leaves the structure of JSON unchanged.
    text = ""
    text_start = file.tell()
    place = 0
    while True:
        gap = _GAP.match(text, place)
        start = gap.end() if gap else place
        try:
            if text[start] == "]":
                break
            if text[start] != "{":
                raise ValueError("neither an object nor the end")
            _, end = decoder.raw_decode(text, start)
        except (IndexError, ValueError, RecursionError) as error:
            more = file.read(max(_READ_BYTES, len(text)))
            if not more or len(text) - place > MAX_RECORD_BYTES:
                what = f"has no JSON object of up to {MAX_RECORD_BYTES} bytes at byte {text_start + place}"
                raise UserError(f"{where}: {what}") from error
            text_start += place
            text = text[place:] + more.decode("latin-1")
            place = 0
        else:
            yield text_start + end, text[start:end].encode("latin-1")
            place = end
    if text[start + 1 :].strip() or file.read(_READ_BYTES).strip():
        raise UserError(f"{where}: has text after the array, at byte {text_start + start + 1}")


@dataclass(frozen=True, kw_only=True)
class TarSource(FileSource):
    """WebDataset shards: members of a sample follow one another, of one name up to its first dot, as in its package."""

    ENDINGS: ClassVar[Sequence[str]] = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")

    text: Sequence[str] = ("txt",)
    images: str | None = "images"
    audio: str | None = "audio"
    video: str | None = "video"
    json_fields: Sequence[str] = ()

    @property
    def texts(self) -> Sequence[str]:
        """The field of rows that holds all text."""
        return ("text",)

    def head(self) -> dict[str, dict[str, str]]:
        """Return nothing, because suffixes state the kind of members."""
        return {}

    @staticmethod
    @lru_cache(maxsize=1024)
    def index(file: Shard) -> Index:
        """Return where samples start, in bytes, up to any damage; ``BadSampleError`` for a compressed file."""
        if not _is_plain(file):
            what = f"{file.label} is compressed; samples can be read from plain .tar files"
            raise BadSampleError(Reason.FILE, what)
        starts = list[int]()
        with suppress(BadSampleError):
            starts.extend(next(members)[1].offset for _, members in _grouped(file, 0))
        return np.array([*starts, 0], np.int64), np.arange(len(starts) + 1)

    def shards(self) -> list[Shard]:
        """Return whole files, because a tar file has no index; ``UserError`` for no files."""
        return self.files()

    def rows(self, shard: Shard, limits: Limits) -> Iterator[Row | BadSampleError]:
        """Read samples as rows: texts, and media by kind; media of plain files are places in them."""
        for _, members in _grouped(shard, shard.part[0] if shard.part else 0):
            error: BadSampleError | None = None
            row: dict[str, list[Any]] = {"text": [], "images": [], "audio": [], "video": []}
            suffixes = set[str]()
            num_bytes = 0
            for archive, info in members:
                try:
                    suffix = _check_member(info, suffixes)
                    kind = kind_of(suffix)
                    is_json = bool(self.json_fields) and suffix.split(".")[-1] == "json"
                    is_place = bool(kind) and _is_plain(shard)
                    is_read = not is_place and bool(kind or is_json or suffix in self.text)
                    num_bytes += _MEMBER_BYTES + info.size * is_read
                    BUDGET.ask(num_bytes, "its members", over_budget)
                    if kind and is_place:
                        row[kind].append(Section(Path(shard.place), info.offset_data, info.size))
                    if not is_read:
                        continue
                    limits.check("file_bytes", info.size, f"{info.name}: {info.size} bytes")
                    content = _content(archive, info)
                    if kind:
                        row[kind].append(content)
                    elif is_json:
                        record = _parsed(content)
                        row["text"] += [record.get(name) for name in self.json_fields]
                    else:
                        row["text"].append(content.decode(errors="replace"))
                except BadSampleError as first:
                    error = error or first
            yield error or row


def _parsed(content: bytes) -> Mapping[str, Any]:
    """Parse a record; ``BadSampleError`` for anything but a JSON object."""
    try:
        record = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadSampleError(Reason.RECORD, f"no JSON: {error}") from error
    if not isinstance(record, Mapping):
        raise BadSampleError(Reason.RECORD, "no mapping")
    return record


def _grouped(file: Shard, start: int) -> Iterator[tuple[str, Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]]]:
    """Yield the keys of samples and their members, from an offset on; ``BadSampleError`` at a damage."""
    return groupby(_members(file, start), lambda member: _key_and_suffix(member[1].name)[0])


def _members(file: Shard, start: int) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    try:
        with Path(file.place).open("rb") as opened:
            opened.seek(start)
            with tarfile.open(fileobj=opened, mode="r:" if _is_plain(file) else "r:*") as archive:
                while info := archive.next():
                    # tarfile would keep all members.
                    archive.members.clear()  # type: ignore[attr-defined]
                    in_sample = _key_and_suffix(info.name)[1] or leaves_root(info.name) or not info.isreg()
                    if not info.isdir() and in_sample:
                        yield archive, info
                # tarfile takes a header that it does not understand for the archive's end.
                rest = archive.fileobj
                assert rest is not None
                rest.seek(archive.offset)
                if rest.read(tarfile.BLOCKSIZE).strip(b"\0"):
                    raise BadSampleError(Reason.FILE, f"damaged at byte {archive.offset}")
    except (tarfile.TarError, EOFError) as error:
        raise BadSampleError(Reason.FILE, f"{error}") from error


def _content(archive: tarfile.TarFile, info: tarfile.TarInfo) -> bytes:
    try:
        return archive.extractfile(info).read()  # type: ignore[union-attr]
    except (tarfile.TarError, EOFError) as error:
        raise BadSampleError(Reason.FILE, f"{info.name}: {error}") from error


def _check_member(info: tarfile.TarInfo, suffixes: set[str]) -> str:
    """Return a member's suffix and add it to those of its sample; ``BadSampleError`` if it is bad or there already."""
    if leaves_root(info.name):
        raise BadSampleError(Reason.OUTSIDE, info.name)
    if not info.isreg() or info.issparse() or info.size < 0:
        raise BadSampleError(Reason.RECORD, f"{info.name}: no plain file")
    _, suffix = _key_and_suffix(info.name)
    if suffix in suffixes:
        raise BadSampleError(Reason.DUPLICATE, info.name)
    suffixes.add(suffix)
    return suffix


def _key_and_suffix(name: str) -> tuple[str, str]:
    """Return the key of a member's sample, and its suffix, which is empty for a member of no sample."""
    folder, slash, base = name.rpartition("/")
    stem, dot, suffix = base.partition(".")
    if _META.match(name):
        return name, ""
    return f"{folder}{slash}{stem}", suffix.lower() if dot and stem else ""


def _is_plain(file: Shard) -> bool:
    return file.place.endswith(".tar")


@dataclass(frozen=True, kw_only=True)
class HubSource(Source):
    """Rows of a dataset of the Hugging Face hub or a folder in one of its layouts, streamed without its scripts.

    Without a ``revision``, a resumed scan of the hub notices no change.
    """

    config: str | None = None
    split: str = "train"
    revision: str | None = None

    def folder(self, shard: Shard | None = None) -> str:  # noqa: ARG002
        """Return the folder of the dataset, whose files rows may name; empty for one of the hub."""
        return os.path.realpath(self.path) if Path(self.path).is_dir() else ""

    def shards(self) -> list[Shard]:
        """Return the dataset's shards; ``UserError`` if it cannot be read."""
        version = ""
        if folder := self.folder():
            # Names, sizes and times of all its files.
            files = [f"{file.label} {file.version}" for file in data_files(folder, ("",), ALL)]
            version = hashlib.sha256("\n".join(files).encode()).hexdigest()[:16]
        total = self._opened().num_shards
        taken = num_taken(self.take, total)
        labels = [f"{self.split}-{number:05d}" for number in range(taken)]
        return [Shard(label, version, self.path, 0, (number, total)) for number, label in enumerate(labels)]

    def rows(self, shard: Shard, limits: Limits) -> Iterator[Row]:  # noqa: ARG002
        """Read the rows of a shard."""
        number, total = shard.part
        yield from self._opened().shard(num_shards=total, index=number)

    def _opened(self) -> Any:
        """Return the dataset, of which nothing is read yet."""
        try:
            import datasets
        except ImportError as error:
            raise UserError("source=hub: datasets is not installed. Run pip install -e '.[data]'") from error
        # They say the same several times.
        for name in ("datasets", "huggingface_hub"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        path = self.folder() or self.path
        try:
            opened = datasets.load_dataset(path, self.config, split=self.split, revision=self.revision, streaming=True)
            return opened.decode(False) if opened.features else opened
        # Errors of the network, the hub and a dataset's own files have no common base.
        except Exception as error:
            raise UserError(f"source.path={self.path}: cannot be opened ({one_line(error)})") from error
