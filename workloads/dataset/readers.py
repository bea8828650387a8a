"""Readers of files: Parquet, Arrow, JSON, tables, tar files, folders of media, and Kaldi's."""

import csv
import io
import json
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import groupby
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from entrain_bench.base.arrays import IntArray
from entrain_bench.base.errors import UserError

from ..budget import BUDGET
from .conventions import KINDS, Chosen, kind_of, roles_of, table_of
from .fields import UNREAD, Medium, Row, Section, leaves_root
from .source import BadSampleError, Limits, Reason, Shard, over_budget

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
COMPRESSED = (".gz", ".zst", ".bz2")
KALDI = ("wav.scp", "text", "utt2dur", "segments")

type Rows = Iterator[Row | list[Any] | BadSampleError]
# Places of a file at which reading may start or must stop, and the numbers of the rows there ``[starts + 1]`` each.
type Index = tuple[IntArray, IntArray]
# A file of a sample: name, bytes, the medium if it may stay where it is, and how its content is read.
type Member = tuple[str, int, Medium | None, Callable[[], bytes]]


def _opened(place: str) -> IO[bytes]:
    """Open a file, whose ending may say that it is compressed."""
    return io.BufferedReader(pa.input_stream(place, compression="detect"))


@lru_cache(maxsize=1024)
def parquet_index(file: Shard) -> Index:
    """Return the row groups."""
    try:
        metadata = pq.read_metadata(file.place)
    except (pa.ArrowException, OSError, UnicodeDecodeError):
        # The scan reports it.
        return np.arange(2), np.zeros(2, np.int64)
    rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    return np.arange(len(rows) + 1), np.cumsum([0, *rows])


def parquet_rows(shard: Shard, chosen: Chosen, limits: Limits) -> Rows:  # noqa: ARG001
    """Read row groups; ``BadSampleError`` if a column is missing, or lists are beyond the budget."""
    # Without a buffer it reads a row group's column whole.
    with pq.ParquetFile(shard.place, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
        columns = {field.name: str(field.type) for field in file.schema_arrow}
        given = [name.partition(".")[0] for name in chosen.names]
        if missing := [name for name in given if name not in columns]:
            raise BadSampleError(Reason.FILE, f"it has no field {missing[0]}; fields: {', '.join(columns)}")
        table = table_of(chosen.conventions)
        known = {*table.names(*KINDS), *table.paths, *roles_of(tuple(columns), chosen), *given, "width", "height"}
        # A struct of a text and bytes with an unknown name is not read.
        unread = {name: UNREAD for name, kind in columns.items() if "binary" in kind and name not in known}
        names = [name for name, kind in columns.items() if name not in unread and (name in known or "string" in kind)]
        for group in range(*shard.part):
            rows = _batch_rows(file.metadata.row_group(group), group, names)
            for batch in file.iter_batches(rows, row_groups=[group], columns=names, use_threads=False):
                yield from (unread | row for row in batch.to_pylist())


def _batch_rows(group: Any, number: int, names: Sequence[str]) -> int:
    """Return how many rows of a row group to read at a time; ``BadSampleError`` if its lists are beyond the budget."""
    chunks = [group.column(index) for index in range(group.num_columns)]
    values = sum(chunk.num_values for chunk in chunks if chunk.path_in_schema.partition(".")[0] in names)
    # Each row has at least one value of each column; one row may have all the others.
    most = max(0, values - group.num_rows * len(names))
    what = f"row group {number + 1}: a row of up to {most:,} list entries (write smaller row groups)"
    BUDGET.ask(most * _ENTRY_BYTES, what, over_budget)
    return min(_BATCH_ROWS, max(1, _BATCH_BYTES * int(group.num_rows) // max(1, int(group.total_byte_size))))


def arrow_rows(shard: Shard, chosen: Chosen, limits: Limits) -> Rows:  # noqa: ARG001
    """Read batches of an Arrow file or stream, such as those of datasets' ``save_to_disk``."""
    with pa.memory_map(shard.place) as file:
        try:
            batches = iter(pa.ipc.open_stream(file))
        except pa.ArrowInvalid:
            reader = pa.ipc.open_file(file)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        for batch in batches:
            for start in range(0, len(batch), _BATCH_ROWS):
                yield from batch.slice(start, _BATCH_ROWS).to_pylist()


def table_rows(shard: Shard, chosen: Chosen, limits: Limits) -> Rows:  # noqa: ARG001
    """Read a table whose first row names the columns."""
    delimiter = "\t" if ".tsv" in Path(shard.place).name.lower() else ","
    before = csv.field_size_limit(MAX_RECORD_BYTES)
    try:
        with _opened(shard.place) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
            yield from csv.DictReader(text, delimiter=delimiter, restkey="more", strict=True)
    finally:
        csv.field_size_limit(before)


@lru_cache(maxsize=1024)
def json_index(file: Shard) -> Index | None:
    """Return where records end, in bytes; ``UserError`` for an array that is no JSON, and a record too long."""
    if _layout(file.place, file.version) == "object":
        # Refused before the scan, if it is.
        _records_of_object(file)
        return None
    if file.place.endswith(COMPRESSED):
        return None
    ends = np.array([0, *(end for end, _ in _split(file, 0))], np.int64)
    return ends, np.arange(len(ends))


def json_rows(shard: Shard, chosen: Chosen, limits: Limits) -> Rows:  # noqa: ARG001
    """Read the records of an array, of lines, or of the list in an object."""
    if _layout(shard.place, shard.version) == "object":
        yield from _records_of_object(shard)
        return
    start, stop = shard.part or (0, None)
    for end, record in _split(shard, start):
        yield _parsed(record)
        if end == stop:
            return


@lru_cache(maxsize=1024)
def _layout(place: str, version: str) -> str:  # noqa: ARG001
    """Return how a file of JSON is laid out: array, lines, or one object, which is a row or holds rows."""
    with _opened(place) as file:
        lines = (line.removeprefix(_BOM).strip() for line in iter(partial(file.readline, MAX_RECORD_BYTES), b""))
        first, second = (next(filter(None, lines), b"") for _ in range(2))
    if first.startswith(b"["):
        return "lines" if second.startswith(b"[") else "array"
    # Behind the first line of an object is a key, its end, or nothing.
    is_object = first.startswith(b"{") and second[:1] in (b"", b'"', b"}")
    return "object" if is_object and ".json" in Path(place).suffixes else "lines"


def _records_of_object(shard: Shard) -> list[Row]:
    """Return an object that is a row, or the records of its one list; ``UserError`` if it is neither or too large."""
    where = f"source.path={shard.place}"
    with _opened(shard.place) as file:
        content = file.read(MAX_RECORD_BYTES + 1)
    if len(content) > MAX_RECORD_BYTES:
        raise UserError(f"{where}: one JSON object of more than {MAX_RECORD_BYTES} bytes; write its records as JSONL")
    values = _parsed(content)
    if not isinstance(values, dict):
        raise UserError(f"{where}: {values}")
    is_row = any(each.fits(tuple(values)) for each in table_of(None).conventions.values())
    if values and not is_row and all(isinstance(each, dict) for each in values.values()):
        # Records by key, which may be the name of a medium.
        return [{"path": key, **each} if kind_of(key) else each for key, each in values.items()]
    lists = {key: each for key, each in values.items() if isinstance(each, list) and each and isinstance(each[0], dict)}
    if is_row or not lists:
        return [values]
    (name, records), *others = lists.items()
    if others or name not in table_of(None).lists:
        what = ", ".join(f"{name} ({len(each):,})" for name, each in lists.items())
        raise UserError(
            f"{where}: one JSON object, not an array or lines; its lists of records: {what}. Write one as JSONL"
        )
    return records


def _parsed(record: Any) -> Row | list[Any] | BadSampleError:
    """Parse a record: a JSON object, or a list of them; an error for anything else."""
    if isinstance(record, bytes):
        try:
            record = json.loads(record)
        except (ValueError, RecursionError) as error:
            return BadSampleError(Reason.RECORD, f"no JSON: {error}")
    if isinstance(record, dict) or (isinstance(record, list) and record and all(isinstance(e, dict) for e in record)):
        return record
    return BadSampleError(Reason.RECORD, "no mapping")


def _split(shard: Shard, start: int) -> Iterator[tuple[int, Any]]:
    """Yield where records end, and their content, parsed or not, from an offset at which a record starts.

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


def _split_array(where: str, file: IO[bytes], text_start: int) -> Iterator[tuple[int, Any]]:
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
            record, end = decoder.raw_decode(text, start)
        except (IndexError, ValueError, RecursionError) as error:
            more = file.read(max(_READ_BYTES, len(text)))
            if not more or len(text) - place > MAX_RECORD_BYTES:
                what = f"has no JSON object of up to {MAX_RECORD_BYTES} bytes at byte {text_start + place}"
                raise UserError(f"{where}: {what}") from error
            text_start += place
            text = text[place:] + more.decode("latin-1")
            place = 0
        else:
            yield text_start + end, record if text.isascii() else text[start:end].encode("latin-1")
            place = end
    if text[start + 1 :].strip() or file.read(_READ_BYTES).strip():
        raise UserError(f"{where}: has text after the array, at byte {text_start + start + 1}")


def tar_rows(shard: Shard, chosen: Chosen, limits: Limits) -> Rows:
    """Read a WebDataset's samples: members that follow one another, of one name up to its first dot, as its package."""
    groups = _grouped(shard, shard.part[0] if shard.part else 0)
    return _rows_of((_checked(members, shard) for members in groups), chosen, limits)


def _rows_of(groups: Iterable[Iterable[Member]], chosen: Chosen, limits: Limits) -> Rows:
    """Yield rows, and errors of single samples; ``BadSampleError`` at a damage."""
    try:
        for members in groups:
            try:
                yield _row_of(members, chosen, limits)
            except BadSampleError as error:
                if error.reason is Reason.FILE:
                    raise
                yield error
    except (tarfile.TarError, EOFError) as error:
        raise BadSampleError(Reason.FILE, str(error)) from error


def _row_of(members: Iterable[Member], chosen: Chosen, limits: Limits) -> Row:
    """Return the row of a sample's files: texts and fields of JSON, and media by kind."""
    table = table_of(chosen.conventions)
    texts = {*chosen.names, *table.names("text", "one")}
    row = dict[str, Any]()
    media: dict[str, list[Medium]] = {}
    suffixes = set[str]()
    num_bytes = 0
    for name, size, place, read in members:
        _, suffix = _key_and_suffix(name)
        if suffix in suffixes:
            raise BadSampleError(Reason.DUPLICATE, name)
        suffixes.add(suffix)
        kind = kind_of(suffix)
        is_json = suffix.split(".")[-1] == "json"
        is_read = place is None if kind else is_json or suffix in texts
        num_bytes += _MEMBER_BYTES + size * is_read
        BUDGET.ask(num_bytes, "its members", over_budget)
        if is_read:
            limits.check("file_bytes", size, f"{name}: {size} bytes")
        if kind:
            media.setdefault(kind, []).append(read() if place is None else place)
        elif is_json:
            record = _parsed(read())
            if isinstance(record, BadSampleError):
                raise record
            row |= {"json": record} if isinstance(record, list) else record
        else:
            row[suffix if is_read else f".{suffix}"] = read().decode(errors="replace") if is_read else UNREAD
    # Names in the JSON are those of members.
    named = {name for kind in media for name in table.media[kind]}
    return {name: value for name, value in row.items() if name not in named} | media


def _checked(members: Iterable[tuple[tarfile.TarFile, tarfile.TarInfo]], shard: Shard) -> Iterator[Member]:
    """Yield members of a tar file; ``BadSampleError`` for names that leave the root, and links."""
    for archive, info in members:
        if leaves_root(info.name):
            raise BadSampleError(Reason.OUTSIDE, info.name)
        if not info.isreg() or info.issparse() or info.size < 0:
            raise BadSampleError(Reason.RECORD, f"{info.name}: no plain file")
        place = Section(Path(shard.place), info.offset_data, info.size) if _is_plain(shard) else None
        yield info.name, info.size, place, partial(_content, archive, info)


def _content(archive: tarfile.TarFile, info: tarfile.TarInfo) -> bytes:
    return archive.extractfile(info).read()  # type: ignore[union-attr]


def _grouped(file: Shard, start: int) -> Iterator[Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]]:
    """Yield the members of each sample, from an offset on."""
    return (group for _, group in groupby(_members(file, start), lambda pair: _key_and_suffix(pair[1].name)[0]))


def _members(file: Shard, start: int) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
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


def _key_and_suffix(name: str) -> tuple[str, str]:
    """Return the key of a file's sample, and its suffix, which is empty for a file of no sample."""
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


def folder_index(folder: Shard) -> Index:
    """Return the numbers of samples."""
    numbers = np.arange(len(_groups(folder)) + 1)
    return numbers, numbers


def folder_rows(shard: Shard, chosen: Chosen, limits: Limits) -> Rows:
    """Read media of a folder, each with the texts and JSON of files of its name, or a line of LibriSpeech's."""
    lines = dict[str, str]()
    for file in sorted(Path(shard.place).glob("*.trans.txt")):
        lines |= _keyed(file)

    def members(group: Sequence[Path]) -> Iterator[Member]:
        yield from ((file.name, file.stat().st_size, file, file.read_bytes) for file in group)
        key, _ = _key_and_suffix(group[0].name)
        if key in lines:
            yield f"{key}.transcript", len(lines[key]), None, lines[key].encode

    return _rows_of(map(members, _groups(shard)[slice(*shard.part)]), chosen, limits)


def _keyed(file: Path) -> dict[str, str]:
    """Return the lines of a file without their first words, by these; none if there is no file."""
    lines = file.read_text(errors="replace").splitlines() if file.is_file() else []
    return {key: rest.strip() for key, _, rest in (line.strip().partition(" ") for line in lines) if key}


def kaldi_rows(shard: Shard, chosen: Chosen, limits: Limits) -> Rows:  # noqa: ARG001
    """Read a Kaldi folder: the utterances of its segments, or else of wav.scp, with their texts and lengths."""
    sounds, texts, lengths, segments = (_keyed(Path(shard.place).parent / name) for name in KALDI)
    for key in segments or sounds:
        recording, *times = segments.get(key, key).split()
        sound = sounds.get(recording, recording)
        seconds = float(times[1]) - float(times[0]) if len(times) > 1 else float(lengths.get(key, 0))
        if sound.endswith("|") and not seconds:
            yield BadSampleError(Reason.RECORD, f"{key}: wav.scp names a command. Write its length to utt2dur")
        else:
            yield {"audio": sound, "transcript": texts.get(key)} | ({"seconds": seconds} if seconds else {})
