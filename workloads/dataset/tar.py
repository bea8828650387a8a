"""WebDataset shards: tar files in which the members of a sample follow one another, of one name up to its first dot.

Read by Python's tarfile. The webdataset package and Hugging Face's reader read every byte of every member and decode
what they read; here headers are enough. Members become samples by the package's rule (tests compare them).
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from entrain_bench.base.arrays import IntArray

from ..budget import BUDGET
from .fields import Fields, FileSource, Row, kind_of
from .files import DataFile, leaves_root
from .interface import BadSampleError, Limits, Medium, Reason, Section, Shard, over_budget

# What an archive says of itself.
_META = re.compile(r"__[^/]*__(?:$|/)")
# Bytes that a member takes in memory in addition to its content.
_MEMBER_BYTES = 2**10


@dataclass(frozen=True, kw_only=True)
class TarSource(FileSource):
    """Samples of tar files (experiments/source/webdataset.yaml).

    Attributes:
        text: suffixes of members that are text.
        json_fields: fields of a sample's .json that are text.
    """

    ENDINGS: ClassVar[Sequence[str]] = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")

    text: Sequence[str] = ("txt",)
    json_fields: Sequence[str] = ()

    def fields_at(self, place: str = "") -> Fields:  # noqa: ARG002
        """Return the fields of a row: a sample's members by what they hold."""
        return Fields(("text",), "images", "audio", "video")

    def shards(self) -> list[Shard]:
        """Return whole files, because a tar file has no index; ``UserError`` for no files."""
        return [Shard(file.label, 0, file.version, str(file.path)) for file in self.files()]

    def head(self) -> tuple[list[str], list[Row]]:
        """Return nothing: suffixes tell what members hold."""
        return [], []

    def rows(self, shard: Shard, limits: Limits) -> Iterator[tuple[str, Row | BadSampleError]]:
        """Read the samples of a file."""
        yield from self._rows(Path(shard.place), 0, limits)

    def row(
        self,
        file: DataFile,
        number: int,
        names: Sequence[str],  # noqa: ARG002
        limits: Limits,
    ) -> tuple[str, Row | BadSampleError]:
        """Read one sample of an archive that is not compressed; its media are places in the archive."""
        if not _is_plain(file.path):
            what = f"{file.path.name} is compressed; samples can be read from plain .tar files"
            raise BadSampleError(Reason.FILE, what)
        starts = _sample_starts(file)
        if not 0 <= number < len(starts):
            raise BadSampleError(Reason.FILE, f"{file.path.name} has no sample {number + 1}")
        return next(self._rows(file.path, int(starts[number]), limits))

    def _rows(self, path: Path, start: int, limits: Limits) -> Iterator[tuple[str, Row | BadSampleError]]:
        """Read the samples from an offset on."""
        for key, members in groupby(_members(path, start), lambda member: _split(member[1].name)[0]):
            error: BadSampleError | None = None
            row: dict[str, list[Any]] = {"text": [], "images": [], "audio": [], "video": []}
            suffixes = set[str]()
            num_bytes = 0
            for archive, info in members:
                try:
                    _check(info, suffixes)
                    num_bytes += _MEMBER_BYTES
                    for field, value in self._read(archive, info, path, limits):
                        num_bytes += len(value) if isinstance(value, bytes | str) else 0
                        row[field].append(value)
                    BUDGET.ask(num_bytes, "its members", over_budget)
                except BadSampleError as found:
                    error = error or found
            yield key, error or row

    def _read(
        self, archive: tarfile.TarFile, info: tarfile.TarInfo, path: Path, limits: Limits
    ) -> Iterator[tuple[str, Medium | Any]]:
        """Yield the field that a member belongs to, and its value; nothing for a member that is not read."""
        _, suffix = _split(info.name)
        kind = kind_of(suffix)
        is_json = suffix.rpartition(".")[2] == "json" and bool(self.json_fields)
        if kind is None and not is_json and suffix not in self.text:
            return
        if kind is not None and _is_plain(path):
            yield kind, Section(path, info.offset_data, info.size)
            return
        if info.size > limits.file_bytes:
            what = f"{info.name}: {info.size} bytes, limits.file_bytes={limits.file_bytes}"
            raise BadSampleError(Reason.LIMIT, what)
        content = archive.extractfile(info).read()  # type: ignore[union-attr]
        if kind is not None:
            yield kind, content
        elif is_json:
            yield from (("text", value) for value in _json_values(content, self.json_fields))
        else:
            yield "text", content.decode(errors="replace")


def _json_values(content: bytes, names: Sequence[str]) -> list[Any]:
    try:
        record = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadSampleError(Reason.RECORD, f".json: {error}") from error
    if not isinstance(record, dict):
        raise BadSampleError(Reason.RECORD, ".json: no mapping")
    return [record.get(name) for name in names]


@lru_cache(maxsize=1024)
def _sample_starts(file: DataFile) -> IntArray:
    """Return where the samples of an archive start, in bytes ``[samples]``, up to any damage."""
    starts = list[int]()
    with suppress(BadSampleError):
        for _, members in groupby(_members(file.path, 0), lambda member: _split(member[1].name)[0]):
            starts.append(next(members)[1].offset)
    return np.array(starts, np.int64)


def _members(path: Path, start: int) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """Yield the members of samples from an offset on; ``BadSampleError`` where the archive is damaged."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            with tarfile.open(fileobj=file, mode="r:" if _is_plain(path) else "r:*") as archive:
                while info := archive.next():
                    # tarfile would keep all members.
                    archive.members.clear()  # type: ignore[attr-defined]
                    if not info.isdir() and (_split(info.name)[1] or leaves_root(info.name) or not info.isreg()):
                        yield archive, info
                # tarfile takes a header that it does not understand for the archive's end.
                rest = archive.fileobj
                assert rest is not None
                rest.seek(archive.offset)
                if rest.read(tarfile.BLOCKSIZE).strip(b"\0"):
                    raise BadSampleError(Reason.FILE, f"damaged at byte {archive.offset}")
    except (tarfile.TarError, EOFError) as error:
        raise BadSampleError(Reason.FILE, f"{error}") from error


def _check(info: tarfile.TarInfo, suffixes: set[str]) -> None:
    """Raise ``BadSampleError`` for a member that is no plain file, or has a suffix of another one; add the suffix."""
    if leaves_root(info.name):
        raise BadSampleError(Reason.OUTSIDE, info.name)
    if not info.isreg() or info.issparse() or info.size < 0:
        raise BadSampleError(Reason.RECORD, f"{info.name}: no plain file")
    _, suffix = _split(info.name)
    if suffix in suffixes:
        raise BadSampleError(Reason.DUPLICATE, info.name)
    suffixes.add(suffix)


def _split(name: str) -> tuple[str, str]:
    """Return the key of a member's sample, and its suffix, which is empty for a member of no sample."""
    folder, slash, base = name.rpartition("/")
    stem, dot, suffix = base.partition(".")
    if _META.match(name):
        return name, ""
    return f"{folder}{slash}{stem}", suffix.lower() if dot and stem else ""


def _is_plain(path: Path) -> bool:
    return path.suffix == ".tar"
