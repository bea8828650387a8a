"""Readers of samples that are several files: members of tar files, media of a folder with their texts, and Kaldi's."""

import re
import tarfile
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..budget import BUDGET
from .conventions import Chosen, kind_of, table_of
from .fields import UNREAD, Medium, Row, Section, leaves_root
from .readers import Index, Rows, parsed
from .source import BadSampleError, Limits, Reason, Shard, over_budget

# Members about the archive itself, and bytes that a member takes in memory in addition to its content.
_META = re.compile(r"__[^/]*__(?:$|/)")
_MEMBER_BYTES = 2**10
KALDI = ("wav.scp", "text", "utt2dur", "segments")


class Member(NamedTuple):
    """A file of a sample: name, bytes (-1: no plain file), how to read it, and where it may stay."""

    name: str
    size: int
    read: Callable[[], bytes]
    place: Section | Path | None = None


def tar_rows(shard: Shard, chosen: Chosen, limits: Limits) -> Rows:
    """Read a WebDataset's samples: members that follow one another, of one name up to its first dot, as its package."""
    return _rows_of(_members(shard), chosen, limits)


def _members(file: Shard) -> Iterator[Member]:
    """Yield members of a tar file; ``BadSampleError`` at a damage."""
    is_plain = file.place.endswith(".tar")
    with tarfile.open(file.place, "r:" if is_plain else "r:*") as archive:
        while info := archive.next():
            # tarfile would keep all members.
            archive.members.clear()  # type: ignore[attr-defined]
            if info.isdir():
                continue
            size = info.size if info.isreg() and not info.issparse() else -1
            place = Section(Path(file.place), info.offset_data, size) if is_plain else None
            yield Member(info.name, size, partial(_content, archive, info), place)
        # tarfile takes a header that it does not understand for the archive's end.
        rest = archive.fileobj
        assert rest is not None
        rest.seek(archive.offset)
        if rest.read(tarfile.BLOCKSIZE).strip(b"\0"):
            raise BadSampleError(Reason.FILE, f"damaged at byte {archive.offset}")


def _content(archive: tarfile.TarFile, info: tarfile.TarInfo) -> bytes:
    return archive.extractfile(info).read()  # type: ignore[union-attr]


def _grouped(members: Iterable[Member]) -> Iterator[Iterator[Member]]:
    """Yield the files of each sample; those of none are left out."""
    files = (one for one in members if one.size < 0 or leaves_root(one.name) or _key_and_suffix(one.name)[1])
    return (group for _, group in groupby(files, lambda file: _key_and_suffix(file.name)[0]))


def _rows_of(members: Iterable[Member], chosen: Chosen, limits: Limits) -> Rows:
    """Yield rows, and errors of single samples; ``BadSampleError`` at a damage."""
    try:
        for group in _grouped(members):
            try:
                yield _row_of(group, chosen, limits)
            except BadSampleError as error:
                if error.reason is Reason.FILE:
                    raise
                yield error
    except (tarfile.TarError, EOFError) as error:
        raise BadSampleError(Reason.FILE, str(error)) from error


def _row_of(members: Iterable[Member], chosen: Chosen, limits: Limits) -> Row:
    """Return the row of a sample's files: texts and fields of JSON, and media by kind.

    ``BadSampleError`` for names that leave the root, links, and members beyond a limit.
    """
    table = table_of(chosen.conventions)
    texts = {*chosen.names, *table.names("text", "one")}
    row = dict[str, Any]()
    media: dict[str, list[Medium]] = {}
    suffixes = set[str]()
    num_bytes = 0
    for name, size, read, place in members:
        if leaves_root(name):
            raise BadSampleError(Reason.OUTSIDE, name)
        if size < 0:
            raise BadSampleError(Reason.RECORD, f"{name}: no plain file")
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
            media.setdefault(kind, []).append(place or read())
        elif is_json:
            record = parsed(read())
            if isinstance(record, BadSampleError):
                raise record
            row |= {"json": record} if isinstance(record, list) else record
        else:
            row[suffix if is_read else f".{suffix}"] = read().decode(errors="replace") if is_read else UNREAD
    # Names in the JSON are those of members.
    named = {name for kind in media for name in table.media[kind]}
    return {name: value for name, value in row.items() if name not in named} | media


def _key_and_suffix(name: str) -> tuple[str, str]:
    """Return the key of a file's sample, and its suffix, which is empty for a file of no sample."""
    folder, slash, base = name.rpartition("/")
    stem, dot, suffix = base.partition(".")
    if _META.match(name):
        return name, ""
    return f"{folder}{slash}{stem}", suffix.lower() if dot and stem else ""


@lru_cache(maxsize=64)
def _groups(folder: Shard) -> list[list[Member]]:
    """Return the files of a folder that share a name up to its first dot, if any is a medium."""
    files = sorted(file for file in Path(folder.place).iterdir() if file.is_file())
    groups = _grouped(Member(file.name, file.stat().st_size, file.read_bytes, file) for file in files)
    return [group for group in map(list, groups) if any(kind_of(each.name) for each in group)]


def folder_index(folder: Shard) -> Index:
    """Return the numbers of samples."""
    numbers = np.arange(len(_groups(folder)) + 1)
    return numbers, numbers


def folder_rows(shard: Shard, chosen: Chosen, limits: Limits) -> Rows:
    """Read media of a folder, each with the texts and JSON of files of its name, or a line of LibriSpeech's."""
    lines = dict[str, str]()
    for file in sorted(Path(shard.place).glob("*.trans.txt")):
        lines |= _keyed(file)

    def members() -> Iterator[Member]:
        for group in _groups(shard)[slice(*shard.part)]:
            yield from group
            key, _ = _key_and_suffix(group[0].name)
            if key in lines:
                yield Member(f"{key}.transcript", len(lines[key]), lines[key].encode)

    return _rows_of(members(), chosen, limits)


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
