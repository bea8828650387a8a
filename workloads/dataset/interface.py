"""The interface between a scan and a source of data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from entrain_bench.base.errors import require

from ..schema import MAX_PIXELS, MAX_SECONDS, MAX_TEXT
from .files import DataFile
from .recent import Recent


class Reason(StrEnum):
    """Why a sample is left out; what a report counts by."""

    CHANGED = "it has changed since the scan"
    CRASH = "its file ended the process that read it"
    DECODE = "it cannot be decoded"
    DUPLICATE = "two members of one name"
    EMPTY = "neither text nor media"
    FILE = "the file cannot be read on"
    FORMAT = "no known format"
    HEADER = "its header cannot be read"
    LIMIT = "beyond a limit"
    MISSING = "a file that does not exist"
    OUTSIDE = "a path that leaves the data's root"
    RECORD = "no valid record"
    THIN = "sides beyond the largest ratio"


class BadSampleError(ValueError):
    """A sample that cannot be in a trace: the reason, by which it is counted, and what is wrong with this one."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason
        self.detail = detail


def over_budget(what: str) -> BadSampleError:
    """A sample that would take more memory than the budget allows."""
    return BadSampleError(Reason.LIMIT, what)


@dataclass(frozen=True, slots=True)
class Known:
    """Sizes that the data itself states, in pixels and in seconds of audio or video; 0 for what it does not."""

    width: int = 0
    height: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Section:
    """A file inside another one: that file's path, and the offset and size of the inner one in bytes."""

    path: Path
    offset: int
    size: int


# An image, sound or video: its content, or the place of that.
type Content = bytes | Path | Section
# The same, or its size.
type Medium = Content | Known


@dataclass(frozen=True, slots=True)
class RawSample:
    """A sample as a data set holds it; nothing of it is decoded.

    Attributes:
        key: what the data calls it, for messages.
        texts: pieces of its text, each of which is tokenized by itself.
        images: its images.
        audio: its sound, if any.
        video: its video, if any.
        seconds: length of the sound or video as the data states it beside the content; None where it does not.
    """

    key: str
    texts: Sequence[str] = ()
    images: Sequence[Medium] = ()
    audio: Medium | None = None
    video: Medium | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record, and why a source can make no sample of it."""

    key: str
    error: BadSampleError


@dataclass(frozen=True, slots=True)
class Shard:
    """A unit of scanning: a file, or a part of one.

    ``label`` is the file's and unique: samples are called ``label:number``, from ``first`` on. ``version`` changes when
    the file does.
    """

    label: str
    first: int
    version: str
    place: str
    part: tuple[int, ...] = ()


class Source(Protocol):
    """Raw data in shards; a frozen dataclass of plain values, for it travels between processes."""

    def shards(self) -> Sequence[Shard]:
        """All shards, always in the same order; ``UserError`` for data that is not there, or lacks a column."""
        ...

    def samples(self, shard: Shard, limits: Limits) -> Iterable[RawSample | BadRecord]:
        """The records of a shard, in order; an exception ends the shard, whose samples before it are kept."""
        ...


class Reader(Protocol):
    """The records of one file, in any order."""

    def record(self, number: int, limits: Limits, *, text_only: bool = False) -> RawSample | BadRecord:
        """A record by its number in a scan; ``BadSampleError`` if there is none. ``text_only`` leaves out its media."""
        ...


@runtime_checkable
class ReadableSource(Protocol):
    """Raw data whose records can be read in any order."""

    def files(self) -> Sequence[DataFile]:
        """All files, labeled as the shards; ``UserError`` for data that is not there."""
        ...

    def reader(self, file: DataFile, kept: Recent[Any]) -> Reader:
        """Read one of ``files``, content of media included; ``BadSampleError`` if its records have no random access.

        Readers keep in ``kept`` what they may need again, by keys with their file's path.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Upper limits of valid samples, checked on headers before anything is decoded.

    experiments/trace.yaml says what each is of.
    """

    side_pixels: int = field(default=100_000)
    image_pixels: int = field(default=1_000_000_000)
    file_bytes: int = field(default=256 * 2**20)
    media: int = field(default=4096)
    text_chars: int = field(default=16 * 2**20)
    seconds: float = field(default=MAX_SECONDS)

    def __post_init__(self) -> None:
        highest = {
            "side_pixels": MAX_PIXELS,
            "image_pixels": MAX_PIXELS**2,
            "file_bytes": 2.0**30,
            "media": 2.0**20,
            "text_chars": min(MAX_TEXT, 2.0**28),
            "seconds": MAX_SECONDS,
        }
        for name, high in highest.items():
            value = getattr(self, name)
            valid = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= high
            require(valid, f"limits.{name}", value, f"above 0, at most {high:g}")
