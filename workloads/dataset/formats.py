"""Readers of files: Parquet, Arrow, JSON, tables, tar files, folders of media; and the Hugging Face hub's library."""

import csv
import glob
import hashlib
import io
import json
import logging
import os
import re
import tarfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from entrain_bench.base.arrays import IntArray
from entrain_bench.base.errors import UserError, require

from ..budget import BUDGET
from ..columns import Take, num_taken
from .errors import BadSampleError, Reason, one_line, over_budget
from .fields import KINDS, UNREAD, Chosen, RawSample, Row, Section, kind_of, leaves_root, roles_of, table_of
from .source import Limits, Shard, Source

# Rows of a shard; a row group is never cut.
_SHARD_ROWS = 4096
# Rows of a batch, and their bytes by the average row of a row group of Parquet.
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
_COMPRESSED = (".gz", ".zst", ".bz2")

# Places of a file at which reading may start or must stop, and the numbers of the rows there ``[starts + 1]`` each.
type Index = tuple[IntArray, IntArray]
type Rows = Iterator[Row | list[Any] | BadSampleError]


@dataclass(frozen=True, slots=True, eq=False)
class Format:
    """Files with some endings; ``index``: where reading may start, None: at the start only."""

    name: str
    endings: Sequence[str]
    rows: Callable[[Shard, Chosen, Limits], Rows]
    index: Callable[[Shard], Index | None] = lambda _: None
    # Whether a file is cut into shards.
    cut: bool = True
    # Names of files that are read with them.
    also: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class FileSource(Source):
    """Local files of any format below; names in rows are those of files below ``root``, or the file's own folder."""

    root: str = ""
    format: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [one.name for one in FORMATS]
        require(
            self.format is None or self.format in names, "source.format", self.format, f"{', '.join(names)}, or null"
        )

    def folder(self, shard: Shard) -> str:
        """Return the folder of the files that rows name."""
        return self.root or str(Path(shard.place).parent)

    def files(self) -> list[Shard]:
        """Return the files that are taken, all of the first format that there is; ``UserError`` if there are none."""
        place = Path(self.path).expanduser()
        found = [(name, _format_of(name)) for name in _names(place)]
        allowed = [one for one in FORMATS if self.format in (None, one.name)]
        kind = next((one for one in allowed if any(one is each for _, each in found)), None)
        if kind is None:
            endings = ", ".join(ending for one in allowed for ending in one.endings)
            problem = "has no" if place.is_dir() else "must be"
            what = f"{problem} {endings} files" if found or place.is_dir() else "does not exist"
            raise UserError(f"source.path={self.path}: {what}")
        files = [name for name, each in found if each is kind]
        if kind is FOLDER:
            files = sorted({file.parent for file in files})
        return _shards(place, files, self.take)

    def unread(self) -> Mapping[str, int]:
        """Return endings of files next to those that are read, and how many; those of media may be named by rows."""
        taken = {_format_of(Path(file.place)) for file in self.files()}
        also = {name for kind in taken if kind for name in kind.also}
        others = [name for name in _names(Path(self.path).expanduser()) if _format_of(name) not in (FOLDER, *taken)]
        named = [name for name in others if name.suffix != ".md" and name.name not in also]
        return dict(Counter(name.suffix or name.name for name in named))

    def shards(self) -> list[Shard]:
        """Return parts of files; ``UserError`` for no files, an array that is no JSON, and a record too long."""
        shards = list[Shard]()
        for file in self.files():
            kind = _format_of(Path(file.place)) or FOLDER
            index = kind.index(file) if kind.cut else None
            if index is None:
                shards.append(file)
                continue
            places, numbers = index
            starts = np.unique(numbers[:-1] // _SHARD_ROWS, return_index=True)[1].tolist()
            for start, stop in pairwise([*starts, len(numbers) - 1]):
                part = (int(places[start]), int(places[stop]))
                shards.append(replace(file, first=int(numbers[start]), part=part))
        return shards

    def rows(self, shard: Shard, limits: Limits) -> Rows:
        """Read the rows of a shard."""
        return (_format_of(Path(shard.place)) or FOLDER).rows(shard, self.chosen, limits)

    def record(self, file: Shard, number: int, limits: Limits) -> RawSample:
        """Read one sample with its media's content; ``BadSampleError`` if there is none."""
        index = (_format_of(Path(file.place)) or FOLDER).index(file)
        first = 0
        part = file
        if index is not None:
            places, numbers = index
            if not 0 <= number < numbers[-1]:
                raise BadSampleError(Reason.FILE, f"{file.label} has no sample {number}")
            start = bisect_right(numbers, number) - 1
            first = int(numbers[start])
            part = replace(file, first=first, part=(int(places[start]), int(places[start + 1])))
        row = next(islice(self.rows(part, limits), number - first, None), None)
        if row is None:
            raise BadSampleError(Reason.FILE, f"{file.label} has no sample {number}")
        return self.sample(row, self.folder(file), content=True)


def _names(place: Path) -> list[Path]:
    """Return the files of a path: one, all in a folder, or those of a pattern."""
    if place.is_file():
        return [place]
    pattern = glob.escape(str(place)) + "/**/*" if place.is_dir() else str(place)
    return [file for name in sorted(glob.iglob(pattern, recursive=True)) if (file := Path(name)).is_file()]  # noqa: PTH207


def _shards(place: Path, files: Sequence[Path], take: Take) -> list[Shard]:
    """Return files as shards, by their path below the folder that all have in common, with bytes and last change."""
    base = place if place.is_dir() else Path(os.path.commonpath([file.parent for file in files]))
    return [
        Shard(
            file.relative_to(base).as_posix(),
            _content_version(file) if file.is_dir() else f"{file.stat().st_size}-{file.stat().st_mtime_ns}",
            str(file),
        )
        for file in files[: num_taken(take, len(files))]
    ]


def _content_version(folder: Path) -> str:
    """Return the bytes and a hash of names, sizes and times of the files below a folder."""
    files = [(str(file), file.stat()) for file in _names(folder)]
    states = "\n".join(f"{name} {state.st_size} {state.st_mtime_ns}" for name, state in files)
    return f"{sum(state.st_size for _, state in files)}-{hashlib.sha256(states.encode()).hexdigest()[:16]}"


def _format_of(file: Path) -> Format | None:
    """Return the format of a file by its ending."""
    return next((one for one in FORMATS if file.name.lower().endswith(tuple(one.endings))), None)


def _opened(place: str) -> IO[bytes]:
    """Open a file, whose ending may say that it is compressed."""
    return io.BufferedReader(pa.input_stream(place, compression="detect"))


@lru_cache(maxsize=1024)
def _parquet_index(file: Shard) -> Index:
    """Return the row groups."""
    try:
        metadata = pq.read_metadata(file.place)
    except (pa.ArrowException, OSError, UnicodeDecodeError):
        # The scan reports it.
        return np.arange(2), np.zeros(2, np.int64)
    rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    return np.arange(len(rows) + 1), np.cumsum([0, *rows])


def _parquet_rows(shard: Shard, chosen: Chosen, limits: Limits) -> Rows:  # noqa: ARG001
    """Read row groups; ``BadSampleError`` if a column is missing, or lists are beyond the budget."""
    # Without a buffer it reads a row group's column whole.
    with pq.ParquetFile(shard.place, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
        columns = {field.name: str(field.type) for field in file.schema_arrow}
        named = [name.partition(".")[0] for name in chosen.names]
        if missing := [name for name in named if name not in columns]:
            others = f"it has no field {missing[0]}; fields: {', '.join(columns)}"
            raise BadSampleError(Reason.FILE, others)
        table = table_of(chosen.conventions)
        known = {*table.names(*KINDS), *table.paths, *roles_of(tuple(columns), chosen), *named}
        names = [name for name, kind in columns.items() if name in known or "string" in kind]
        # A struct of a text and bytes with an unknown name is not read.
        unread = {name: UNREAD for name, kind in columns.items() if "binary" in kind and name not in known}
        names = [name for name in names if name not in unread]
        names += [name for name in ("width", "height") if name in columns and name not in names]
        for group in range(*shard.part):
            for batch in _batches(file, group, names):
                yield from (unread | row for row in batch.to_pylist())


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


def _arrow_rows(shard: Shard, chosen: Chosen, limits: Limits) -> Rows:  # noqa: ARG001
    """Read batches of an Arrow file or stream, such as those of datasets' ``save_to_disk``."""
    with pa.memory_map(shard.place) as file:
        try:
            reader = pa.ipc.open_stream(file)
        except pa.ArrowInvalid:
            random = pa.ipc.open_file(file)
            reader = (random.get_batch(number) for number in range(random.num_record_batches))
        for batch in reader:
            for start in range(0, len(batch), _BATCH_ROWS):
                yield from batch.slice(start, _BATCH_ROWS).to_pylist()


def _table_rows(shard: Shard, chosen: Chosen, limits: Limits) -> Rows:  # noqa: ARG001
    """Read a table whose first row names the columns."""
    csv.field_size_limit(MAX_RECORD_BYTES)
    is_tabs = ".tsv" in Path(shard.place).name.lower()
    with _opened(shard.place) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
        yield from csv.DictReader(text, delimiter="\t" if is_tabs else ",", restkey="more", strict=True)


@lru_cache(maxsize=1024)
def _json_index(file: Shard) -> Index | None:
    """Return where records end, in bytes; ``UserError`` for an array that is no JSON, and a record too long."""
    if _layout(file.place, file.version) == "object":
        # Refused before the scan, if it is.
        next(_records_of_object(file), None)
        return None
    if file.place.endswith(_COMPRESSED):
        return None
    ends = np.array([0, *(end for end, _ in _split(file, 0))], np.int64)
    return ends, np.arange(len(ends))


def _json_rows(shard: Shard, chosen: Chosen, limits: Limits) -> Rows:  # noqa: ARG001
    """Read the records of an array, of lines, or of the list in an object."""
    if _layout(shard.place, shard.version) == "object":
        yield from _records_of_object(shard)
        return
    start, stop = shard.part or (0, None)
    for end, content in _split(shard, start):
        yield _parsed(content)
        if stop is not None and end >= stop:
            return


@lru_cache(maxsize=1024)
def _layout(place: str, version: str) -> str:  # noqa: ARG001
    """Return how a file of JSON is laid out: array, lines, or object, which is no row but may hold rows."""
    with _opened(place) as file:
        first, second = (file.readline(MAX_RECORD_BYTES).removeprefix(_BOM).strip() for _ in range(2))
    if first.startswith(b"["):
        return "lines" if second.startswith(b"[") else "array"
    if ".json" not in Path(place).suffixes:
        return "lines"
    try:
        row = json.loads(first)
    except (ValueError, RecursionError):
        return "object" if first.startswith(b"{") and second[:1] not in (b"", b"{") else "lines"
    is_object = isinstance(row, dict) and not second and not _is_row(row) and bool(_lists(row))
    return "object" if is_object else "lines"


def _is_row(values: Mapping[str, Any]) -> bool:
    """Return whether an object is of any convention."""
    return any(each.fits(tuple(values)) for each in table_of(None).conventions.values())


def _lists(values: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the lists of records in an object; one without a name if all of its values are records."""
    if values and all(isinstance(each, dict) for each in values.values()):
        # A key may be the name of a medium.
        return {"": [{"path": key, **each} if kind_of(key) else each for key, each in values.items()]}
    return {key: each for key, each in values.items() if isinstance(each, list) and each and isinstance(each[0], dict)}


def _records_of_object(shard: Shard) -> Rows:
    """Yield the records of the one list in an object; ``UserError`` for none, several, and an object too large."""
    where = f"source.path={shard.place}"
    with _opened(shard.place) as file:
        content = file.read(MAX_RECORD_BYTES + 1)
    if len(content) > MAX_RECORD_BYTES:
        raise UserError(f"{where}: one JSON object of more than {MAX_RECORD_BYTES} bytes; write its records as JSONL")
    values = _parsed(content)
    if isinstance(values, BadSampleError):
        raise UserError(f"{where}: {values}")
    assert isinstance(values, dict)
    lists = _lists(values)
    named = [name for name in lists if name in ("", *table_of(None).lists)]
    if not _is_row(values) and (len(lists) != 1 or not named):
        what = ", ".join(f"{name} ({len(each):,})" for name, each in lists.items()) or "none"
        raise UserError(
            f"{where}: one JSON object, not an array or lines; its lists of records: {what}. Write one as JSONL"
        )
    yield from [values] if _is_row(values) else lists[named[0]]


def _parsed(content: bytes) -> Row | list[Any] | BadSampleError:
    """Parse a record: a JSON object, or a list of them; an error for anything else."""
    try:
        record = json.loads(content)
    except (ValueError, RecursionError) as error:
        return BadSampleError(Reason.RECORD, f"no JSON: {error}")
    if isinstance(record, dict) or (isinstance(record, list) and record and all(isinstance(e, dict) for e in record)):
        return record
    return BadSampleError(Reason.RECORD, "no mapping")


def _split(shard: Shard, start: int) -> Iterator[tuple[int, bytes]]:
    """Yield where records end and their content, from an offset at which a record starts.

    ``UserError`` for an array whose elements are no JSON objects, and for a record that is too long.
    """
    with _opened(shard.place) as file:
        is_array = _layout(shard.place, shard.version) == "array"
        if start:
            file.seek(start)
        yield from (_split_array if is_array else _split_lines)(f"source.path={shard.place}", file, start)


def _split_lines(where: str, file: IO[bytes], end: int) -> Iterator[tuple[int, bytes]]:
    while line := file.readline(MAX_RECORD_BYTES):
        end += len(line)
        if len(line) == MAX_RECORD_BYTES:
            raise UserError(f"{where}: the line that ends at byte {end} is longer than that")
        if line.removeprefix(_BOM).strip():
            yield end, line


def _split_array(where: str, file: IO[bytes], text_start: int) -> Iterator[tuple[int, bytes]]:
    decoder = json.JSONDecoder()
    # One character per byte, which leaves the structure of JSON unchanged.
    text = ""
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


@lru_cache(maxsize=1024)
def _tar_index(file: Shard) -> Index:
    """Return where samples start, in bytes, up to any damage; ``BadSampleError`` for a compressed file."""
    if not _is_plain(file):
        what = f"{file.label} is compressed; samples can be read from plain .tar files"
        raise BadSampleError(Reason.FILE, what)
    starts = list[int]()
    with suppress(BadSampleError):
        starts.extend(next(members)[1].offset for _, members in _grouped(file, 0))
    return np.array([*starts, 0], np.int64), np.arange(len(starts) + 1)


def _tar_rows(shard: Shard, chosen: Chosen, limits: Limits) -> Rows:
    """Read a WebDataset's samples: members that follow one another, of one name up to its first dot, as its package.

    Texts and fields of JSON are fields of a row, media by kind; media of plain files are places in them.
    """
    table = table_of(chosen.conventions)
    texts = {*chosen.names, *table.names("text", "one")}
    for _, members in _grouped(shard, shard.part[0] if shard.part else 0):
        error: BadSampleError | None = None
        row = dict[str, Any]()
        media: dict[str, list[Any]] = {}
        suffixes = set[str]()
        num_bytes = 0
        for archive, info in members:
            try:
                suffix = _check_member(info, suffixes)
                kind = kind_of(suffix)
                is_json = suffix.split(".")[-1] == "json"
                is_place = bool(kind) and _is_plain(shard)
                is_read = not is_place and bool(kind or is_json or suffix in texts)
                num_bytes += _MEMBER_BYTES + info.size * is_read
                BUDGET.ask(num_bytes, "its members", over_budget)
                if kind and is_place:
                    media.setdefault(kind, []).append(Section(Path(shard.place), info.offset_data, info.size))
                elif not is_read:
                    row[f".{suffix}"] = UNREAD
                if not is_read:
                    continue
                limits.check("file_bytes", info.size, f"{info.name}: {info.size} bytes")
                content = _content(archive, info)
                if kind:
                    media.setdefault(kind, []).append(content)
                elif is_json:
                    record = _parsed(content)
                    if isinstance(record, BadSampleError):
                        raise record
                    row |= {"json": record} if isinstance(record, list) else record
                else:
                    row[suffix] = content.decode(errors="replace")
            except BadSampleError as first:
                error = error or first
        # Names in the JSON are those of members.
        named = {name for kind in media for name in table.media[kind]}
        yield error or {name: value for name, value in row.items() if name not in named} | media


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


@lru_cache(maxsize=64)
def _groups(folder: Shard) -> list[list[Path]]:
    """Return the files of a folder that share a name up to its first dot, if any is a medium."""
    files = sorted(file for file in Path(folder.place).iterdir() if file.is_file())
    groups = (list(group) for _, group in groupby(files, lambda file: _key_and_suffix(file.name)[0]))
    return [group for group in groups if any(kind_of(file.name) for file in group)]


def _folder_index(folder: Shard) -> Index:
    """Return the numbers of samples."""
    numbers = np.arange(len(_groups(folder)) + 1)
    return numbers, numbers


def _folder_rows(shard: Shard, chosen: Chosen, limits: Limits) -> Rows:  # noqa: ARG001
    """Read media of a folder, each with the text of a file of its name: .txt, .caption, or a line of LibriSpeech's."""
    lines = dict[str, str]()
    for file in sorted(Path(shard.place).glob("*.trans.txt")):
        lines |= _keyed(file)
    for group in _groups(shard)[slice(*shard.part)]:
        row = dict[str, Any]()
        for file in group:
            kind = kind_of(file.name)
            if kind:
                row.setdefault(kind, []).append(file)
            elif file.suffix in (".txt", ".caption"):
                limits.check("file_bytes", file.stat().st_size, file.name)
                row[file.suffix[1:]] = file.read_text(errors="replace")
            else:
                row[file.suffix] = UNREAD
        key = group[0].name.partition(".")[0]
        yield row | ({"transcript": lines[key]} if key in lines else {})


def _keyed(file: Path) -> dict[str, str]:
    """Return the lines of a file without their first words, by these; none if there is no file."""
    lines = file.read_text(errors="replace").splitlines() if file.is_file() else []
    return {key: rest.strip() for key, _, rest in (line.strip().partition(" ") for line in lines) if key}


def _kaldi_rows(shard: Shard, chosen: Chosen, limits: Limits) -> Rows:  # noqa: ARG001
    """Read a Kaldi folder: the utterances of its segments, or else of wav.scp, with their texts and lengths."""
    folder = Path(shard.place).parent
    sounds, texts, lengths, segments = (_keyed(folder / name) for name in _KALDI)
    for key in segments or sounds:
        recording, *times = segments.get(key, key).split()
        sound = sounds.get(recording, recording)
        seconds = float(times[1]) - float(times[0]) if len(times) > 1 else float(lengths.get(key, 0))
        if sound.endswith("|") and not seconds:
            yield BadSampleError(Reason.RECORD, f"{key}: wav.scp names a command. Write its length to utt2dur")
        else:
            yield {"audio": sound, "transcript": texts.get(key)} | ({"seconds": seconds} if seconds else {})


_KALDI = ("wav.scp", "text", "utt2dur", "segments")
_JSON = (".json", ".jsonl", ".ndjson")
_TABLE = (".csv", ".tsv")
FOLDER = Format("media", [f".{ending}" for ending in table_of(None).endings], _folder_rows, _folder_index)
# A folder is read by the first format of which it has files.
FORMATS = (
    Format("parquet", [".parquet"], _parquet_rows, _parquet_index),
    Format("arrow", [".arrow"], _arrow_rows),
    Format("webdataset", [".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz"], _tar_rows, _tar_index, cut=False),
    Format("json", [end + packed for end in _JSON for packed in ("", *_COMPRESSED)], _json_rows, _json_index),
    Format("table", [end + packed for end in _TABLE for packed in ("", *_COMPRESSED)], _table_rows),
    Format("kaldi", [_KALDI[0]], _kaldi_rows, also=_KALDI),
    FOLDER,
)


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
            version = _content_version(Path(folder))
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
