"""WebDataset shards: tar files in which the members of a sample follow one another, of one name up to its first dot.

Read by Python's own tarfile. The webdataset package reads every byte of every member and knows decoders that run what
they read (pickle); here the headers of an archive and of its media are enough. How members become samples is the
package's rule (tests compare them).
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import IO, Any

import numpy as np

from entrain_bench.base.arrays import IntArray

from ..budget import BUDGET
from ..take import ALL, Take
from .fields import Fields
from .files import DataFile, data_files
from .interface import BadRecord, BadSampleError, Limits, Medium, RawSample, Reason, Section, Shard, over_budget
from .known import ENDINGS
from .paths import leaves_root
from .recent import Recent

SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
_OPENERS: dict[str, Any] = {".gz": gzip.open, ".tgz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
# What an archive says of itself.
_META = re.compile(r"__[^/]*__(?:$|/)")
# What a member takes in memory beside its content.
_MEMBER_BYTES = 2**10
# What no header of an archive takes, whatever it says.
_HEADER_BYTES = 2**20


@dataclass(slots=True)
class _Group:
    """The members of one sample so far."""

    key: str
    texts: list[str] = field(default_factory=list)
    media: dict[str, list[Medium]] = field(default_factory=lambda: {"images": [], "audio": [], "video": []})
    suffixes: set[str] = field(default_factory=set)
    error: BadSampleError | None = None
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TarSource:
    """Samples of tar files; experiments/source/webdataset.yaml explains the attributes."""

    path: str
    text: Sequence[str] = ("txt",)
    json_fields: Sequence[str] = ()
    take: str = ALL

    def __post_init__(self) -> None:
        Take.parse(self.take, "source.take")

    def shards(self) -> list[Shard]:
        """Whole files, since the headers of a tar file follow from one another; ``UserError`` for no files."""
        return [Shard(file.label, 0, file.version, str(file.path)) for file in self.files()]

    def files(self) -> list[DataFile]:
        """All files; ``UserError`` if there are none."""
        return data_files(self.path, SUFFIXES, Take.parse(self.take, "source.take"))

    def reader(self, file: DataFile, kept: Recent[Any]) -> TarReader:  # noqa: ARG002
        """Reads samples by their numbers, of an archive that is not compressed."""
        return TarReader.of(self, file.path)

    def samples(self, shard: Shard, limits: Limits) -> Iterator[RawSample | BadRecord]:
        """The samples of a file."""
        path = Path(shard.place)
        opener = _OPENERS.get(path.suffix)
        with opener(path, "rb") if opener else path.open("rb") as file:
            yield from self.samples_from(file, path if opener is None else None, limits)

    def samples_from(self, file: IO[bytes], plain: Path | None, limits: Limits) -> Iterator[RawSample | BadRecord]:
        """The samples of an archive from where it stands: at its beginning, or at a sample's."""
        for key, members in groupby(_named_members(file), lambda member: member[1]):
            group = _Group(key)
            for member, _, suffix, error in members:
                try:
                    if error:
                        raise error
                    self._add(group, member, suffix, file, plain, limits)
                except BadSampleError as found:
                    group.error = group.error or found
            yield _finished(group)

    def _add(
        self, group: _Group, member: tarfile.TarInfo, suffix: str, file: IO[bytes], plain: Path | None, limits: Limits
    ) -> None:
        """One more member of a sample; ``plain`` is the archive's path, if it is not compressed."""
        if suffix in group.suffixes:
            raise BadSampleError(Reason.DUPLICATE, member.name)
        group.num_bytes += _MEMBER_BYTES
        BUDGET.ask(group.num_bytes, "its members", over_budget)
        group.suffixes.add(suffix)
        last = suffix.rpartition(".")[2]
        kind = next((kind for kind, known in ENDINGS.items() if last in known), None)
        is_json = last == "json" and bool(self.json_fields)
        if kind is None and not is_json and suffix not in self.text:
            return
        if kind is not None and plain is not None:
            group.media[kind].append(Section(plain, member.offset_data, member.size))
            return
        if member.size > limits.file_bytes:
            what = f"{member.name}: {member.size} bytes, limits.file_bytes={limits.file_bytes}"
            raise BadSampleError(Reason.LIMIT, what)
        group.num_bytes += member.size
        BUDGET.ask(group.num_bytes, "its members", over_budget)
        file.seek(member.offset_data)
        content = file.read(member.size)
        if len(content) < member.size:
            raise EOFError("unexpected end of data")
        if kind is not None:
            group.media[kind].append(content)
        elif is_json:
            group.texts += _json_texts(content, self.json_fields)
        else:
            group.texts.append(content.decode(errors="replace"))


def _finished(group: _Group) -> RawSample | BadRecord:
    if group.error:
        return BadRecord(group.key, group.error)
    sounds = group.media["audio"]
    videos = group.media["video"]
    if len(sounds) > 1 or len(videos) > 1:
        return BadRecord(group.key, BadSampleError(Reason.RECORD, "several sounds or videos; a sample has one"))
    media = (next(iter(sounds), None), next(iter(videos), None))
    return RawSample(group.key, group.texts, group.media["images"], *media)


def _split(name: str) -> tuple[str, str]:
    """The key of a member's sample, and its suffix; the latter is empty for what belongs to none."""
    folder, slash, base = name.rpartition("/")
    stem, dot, suffix = base.partition(".")
    if _META.match(name):
        return name, ""
    return f"{folder}{slash}{stem}", suffix.lower() if dot and stem else ""


@dataclass(frozen=True, slots=True)
class TarReader:
    """Samples of an archive by their numbers; ``starts`` of each one's first header in bytes ``[samples]``."""

    source: TarSource
    path: Path
    starts: IntArray

    @classmethod
    def of(cls, source: TarSource, path: Path) -> TarReader:
        """Read the headers of an archive once; ``BadSampleError`` for a compressed one."""
        if path.suffix in _OPENERS:
            raise BadSampleError(Reason.FILE, f"{path.name} is compressed; samples can be read from plain .tar files")
        with path.open("rb") as file:
            starts = np.fromiter(_starts(file), np.int64)
        return cls(source, path, starts)

    def record(self, number: int, limits: Limits, *, text_only: bool = False) -> RawSample | BadRecord:  # noqa: ARG002
        """A sample; its media are places in the archive."""
        if not 0 <= number < len(self.starts):
            raise BadSampleError(Reason.FILE, f"{self.path.name} has no sample {number + 1}")
        with self.path.open("rb") as file:
            file.seek(int(self.starts[number]))
            return next(self.source.samples_from(file, self.path, limits))


def _starts(file: IO[bytes]) -> Iterator[int]:
    """Where the samples of an archive begin; of a damaged one those before the damage."""
    with suppress(BadSampleError):
        for _, members in groupby(_named_members(file), lambda member: member[1]):
            yield next(members)[0].offset


def _named_members(file: IO[bytes]) -> Iterator[tuple[tarfile.TarInfo, str, str, BadSampleError | None]]:
    """The members of samples, the samples' keys, the members' suffixes, and what is wrong with them."""
    try:
        with tarfile.open(fileobj=_Guarded(file), mode="r:") as archive:
            while member := archive.next():
                # It would keep them all.
                archive.members.clear()  # type: ignore[attr-defined]
                if member.isdir():
                    continue
                error = None
                if leaves_root(member.name):
                    error = BadSampleError(Reason.OUTSIDE, member.name)
                elif not member.isreg() or member.issparse():
                    error = BadSampleError(Reason.RECORD, f"{member.name}: no plain file")
                elif member.size < 0:
                    error = BadSampleError(Reason.RECORD, f"{member.name}: {member.size} bytes")
                key, suffix = _split(member.name)
                if error is not None or suffix:
                    yield member, key, suffix, error
            file.seek(archive.offset)
            # A header that it does not understand ends an archive, for it, as its end does.
            if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
                raise BadSampleError(Reason.FILE, f"damaged at byte {archive.offset}")
    except (tarfile.TarError, EOFError, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise BadSampleError(Reason.FILE, f"{error}") from error


def _json_texts(content: bytes, fields: Sequence[str]) -> Sequence[str]:
    try:
        record = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadSampleError(Reason.RECORD, f".json: {error}") from error
    if not isinstance(record, dict):
        raise BadSampleError(Reason.RECORD, ".json: no mapping")
    return Fields(text=tuple(fields)).sample("", record).texts


class _Guarded(io.RawIOBase):
    """A file of which nothing large is read at once: headers that state a size may state any."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self._file.read(size)
