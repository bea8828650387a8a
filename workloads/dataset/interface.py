"""Samples of raw data sets, and the interface between a scan and a source."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from entrain_bench.base.errors import require

from ..schema import MAX_PIXELS, MAX_SECONDS, MAX_TEXT


class Reason(StrEnum):
    """Why a sample is left out."""

    CHANGED = "it has changed since the scan"
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
    """A sample that cannot be in a trace: the reason, and what is wrong with this sample."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason


def over_budget(what: str) -> BadSampleError:
    """Return the error of a sample that would take more memory than the budget allows."""
    return BadSampleError(Reason.LIMIT, what)


def one_line(error: Exception) -> str:
    """Return a short text of an error."""
    return " ".join(str(error).split())[:120] or type(error).__name__


@dataclass(frozen=True, slots=True)
class Known:
    """Sizes that the data states, in pixels and in seconds of audio or video; 0: not stated."""

    width: int = 0
    height: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Section:
    """A file inside another file; offset and size in bytes."""

    path: Path
    offset: int
    size: int


# An image, sound or video: its bytes, or where they are.
type Content = bytes | Path | Section
type Medium = Content | Known


@dataclass(frozen=True, slots=True)
class RawSample:
    """A sample as a data set holds it, not decoded.

    Attributes:
        key: name in the data, for messages.
        texts: pieces of text, tokenized one by one.
        images: images.
        audio: sound, if any.
        video: video, if any.
        seconds: length of the sound or video as the data states it; None: not stated.
    """

    key: str
    texts: Sequence[str] = ()
    images: Sequence[Medium] = ()
    audio: Medium | None = None
    video: Medium | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record of which a source can make no sample."""

    key: str
    error: BadSampleError


@dataclass(frozen=True, slots=True)
class Shard:
    """A unit of scanning: a file, or a part of one.

    Attributes:
        label: unique name of the file. Samples are called ``label:number``.
        first: number of the first sample.
        version: changes when the file does.
        place: where the file is.
        part: start and end of the part, in units of the source.
    """

    label: str
    first: int
    version: str
    place: str
    part: tuple[int, ...] = ()


class Source(Protocol):
    """Raw data in shards; a frozen dataclass of plain values that travels between processes."""

    def shards(self) -> Sequence[Shard]:
        """Return all shards, always in the same order; ``UserError`` for missing data or columns."""
        ...

    def samples(self, shard: Shard, limits: Limits) -> Iterable[RawSample | BadRecord]:
        """Read the records of a shard in order; after an exception, earlier samples are kept."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Upper limits of a sample (experiments/trace.yaml), checked on headers before decoding."""

    side_pixels: int = 100_000
    image_pixels: int = 1_000_000_000
    file_bytes: int = 256 * 2**20
    media: int = 4096
    text_chars: int = 16 * 2**20
    seconds: float = MAX_SECONDS

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
