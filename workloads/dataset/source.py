"""The interface of raw data: samples, files, and the fields of rows that hold text, images, audio and video."""

import glob
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeGuard

from entrain_bench.base.errors import UserError, require
from entrain_bench.specs.parse import Allowed

from ..budget import BUDGET
from ..columns import ALL, MAX_PIXELS, MAX_SECONDS, Take, num_taken

# In place of a field's name: the first of the names below that the data has.
AUTO = "auto"
# Fields that belong together are read together.
TEXTS = (
    ("conversations",),
    ("messages",),
    ("texts",),
    ("text",),
    ("caption",),
    ("captions",),
    ("transcript",),
    ("transcription",),
    ("sentence",),
    ("question", "query", "prompt", "instruction", "input", "answer", "response", "completion", "output"),
)
# The endings of their values state the kind of these fields.
PATHS = ("path", "file_name", "filename", "file_path", "filepath", "file")
MEDIA: Mapping[str, Sequence[str]] = {
    "images": ("image", "images", "image_path", "image_paths", "image_file", "img", "img_path", *PATHS),
    "audio": ("audio", "audio_filepath", "audio_path", "audio_file", "wav", "wav_path", "sound", "speech", *PATHS),
    "video": ("video", "videos", "video_path", "video_filepath", "video_file", "clip", *PATHS),
}
SECONDS = ("duration", "seconds", "duration_s", "length_s")
ENDINGS: Mapping[str, Collection[str]] = {
    "images": frozenset({"jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "avif", "jp2", "ppm"}),
    "audio": frozenset({"wav", "flac", "ogg", "opus", "mp3"}),
    "video": frozenset({"mp4", "mov", "m4v", "mkv", "webm", "avi"}),
}
# Fields of a turn of a conversation, in FineVision, LLaVA and chat templates.
TURN_KEYS = ("user", "assistant", "value", "content", "text", "question", "answer")
_PLACEHOLDER = re.compile("<(?:image|video|audio)>\n?")
_DEPTH = 8
# Fields are found by the first rows of the first readable shard, or where a row may lack fields, of each of some.
_HEAD_ROWS = 128
_HEAD_SHARDS = 8
# That a field has any value.
VALUE = "value"


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
    """A sample that cannot be in a trace: the general reason, and this sample's problem."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason


# The error of a sample that would take more memory than the budget allows.
over_budget = partial(BadSampleError, Reason.LIMIT)


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
    """A member of a plain tar file; offset and size of its content in bytes."""

    path: Path
    offset: int
    size: int


# An image, sound or video: its bytes, or where they are.
type Content = bytes | Path | Section
type Medium = Content | Known
type Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RawSample:
    """A sample, not decoded; texts are tokenized one by one, ``seconds`` is the stated length of the sound or video."""

    texts: Sequence[str] = ()
    images: Sequence[Medium] = ()
    audio: Medium | None = None
    video: Medium | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Shard:
    """A file, or a part of one that is scanned in one go; its samples are called ``label:number``."""

    label: str
    # Changes when the file does.
    version: str
    place: str
    # Number of the first sample, and start and end of the part in units of the source.
    first: int = 0
    part: tuple[int, ...] = ()


def _most(high: float) -> Allowed:
    return Allowed(lambda value: 0 < value <= high, f"above 0, at most {high:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Upper limits of a sample (experiments/trace.yaml), checked on headers before decoding."""

    side_pixels: Annotated[int, _most(MAX_PIXELS)] = 100_000
    image_pixels: Annotated[int, _most(MAX_PIXELS**2)] = 1_000_000_000
    file_bytes: Annotated[int, _most(2.0**30)] = 256 * 2**20
    media: Annotated[int, _most(2.0**20)] = 4096
    text_chars: Annotated[int, _most(2.0**28)] = 16 * 2**20
    seconds: Annotated[float, _most(MAX_SECONDS)] = MAX_SECONDS

    def check(self, limit: str, value: float, what: str) -> None:
        """Raise ``BadSampleError`` for a value beyond a limit; ``what`` names the value."""
        if value > getattr(self, limit):
            raise BadSampleError(Reason.LIMIT, f"{what}, limits.{limit}={getattr(self, limit):.10g}")


@dataclass(frozen=True, kw_only=True)
class Source(ABC):
    """Raw data in shards of rows; travels between processes. experiments/source/parquet.yaml explains the fields.

    An image, sound or video is content, a file's name, both (Hugging Face), or width and height.
    """

    # Whether a row may lack fields that others have.
    SPARSE: ClassVar[bool] = False

    path: str
    text: Sequence[str] | str | None = ()
    images: str | None = None
    audio: str | None = None
    video: str | None = None
    seconds: str | None = None
    take: Take = ALL

    def __post_init__(self) -> None:
        require(bool(self.names), "source", "no fields", "at least one of text, images, audio, video")

    @property
    def texts(self) -> Sequence[str]:
        """Fields of text."""
        return (self.text,) if isinstance(self.text, str) else tuple(self.text or ())

    @property
    def names(self) -> tuple[str, ...]:
        """All fields that are read."""
        others = (self.images, self.audio, self.video, self.seconds)
        return tuple(dict.fromkeys([*self.texts, *(name for name in others if name)]))

    @abstractmethod
    def shards(self) -> list[Shard]:
        """Return all shards, always in the same order; ``UserError`` for missing data."""

    @abstractmethod
    def rows(self, shard: Shard, limits: Limits) -> Iterator[Row | BadSampleError]:
        """Read the rows of a shard; after an exception, earlier rows are kept."""

    def folder(self, shard: Shard) -> str:  # noqa: ARG002
        """Return the folder of the files that rows name; empty: they may name none."""
        return ""

    def head(self) -> dict[str, dict[str, str]]:
        """Return the fields of first rows: the kind of values (``kind_of``, ``VALUE``), with an example's name."""
        whole = replace(self, text=AUTO)
        fields = dict[str, dict[str, str]]()
        for shard in self.shards()[:_HEAD_SHARDS]:
            if fields and not self.SPARSE:
                break
            # The scan reports unreadable files.
            with suppress(Exception), BUDGET.held():
                for row in islice(whole.rows(shard, Limits()), _HEAD_ROWS):
                    for field, value in row.items() if isinstance(row, Mapping) else ():
                        held = fields.setdefault(str(field), {})
                        name = _file_name(value)
                        if value not in (None, "", []):
                            held[VALUE] = name
                        if kind := kind_of(name):
                            held.setdefault(kind, name)
        return fields

    def sample(self, row: Row | BadSampleError, folder: str, content: bool = False) -> RawSample:
        """Return the sample of a row; ``content``: also where the row states sizes.

        ``BadSampleError`` for a row that is one, wrong types, and names that leave the folder.
        """
        if isinstance(row, BadSampleError):
            raise row
        texts = [text for name in self.texts for text in _texts(row.get(name), name, _DEPTH)]
        seconds = row.get(self.seconds) if self.seconds else None
        if seconds is not None and not _is_number(seconds):
            raise BadSampleError(Reason.RECORD, f"{self.seconds}: {str(seconds)[:40]!r} is no number of seconds")
        timed = dict[str | None, Medium | None]()
        for name in (self.audio, self.video):
            values = _listed(row, name)
            if len(values) > 1:
                raise BadSampleError(Reason.RECORD, f"{name}: {len(values)} of them; a sample has one")
            if values and seconds is not None and not content:
                timed[name] = Known(*(_stated_size(row) or (0, 0)), float(seconds))
            else:
                timed[name] = _medium(values[0], name, folder, content) if values else None
        images = [_medium(value, self.images, folder, content) for value in _listed(row, self.images)]
        length = None if seconds is None else float(seconds)
        return RawSample(texts, images, timed[self.audio], timed[self.video], length)


def recognised(source: Source) -> Source:
    """Return the source with names of its data's fields in place of ``auto``.

    ``UserError`` if no field has a known name, the data lack a field, or rows name media that no field would read.
    """
    if not isinstance(source, Source):
        return source
    fields = source.head()
    if not fields and AUTO not in source.names:
        return source
    chosen: dict[str, Any] = {kind: getattr(source, kind) for kind in (*MEDIA, "seconds", "text")}
    for kind, known in MEDIA.items():
        if chosen[kind] is None:
            continue
        if chosen[kind] == AUTO:
            named = (name for name in known if name in fields and (name not in PATHS or kind in fields[name]))
            chosen[kind] = next(named, None)
        _check_read(kind, chosen[kind], fields)
    if chosen["seconds"] == AUTO:
        chosen["seconds"] = next((name for name in SECONDS if name in fields), None)
        # A path with any ending is a sound's if a length stands next to it.
        if chosen["seconds"] and source.audio == AUTO and not (chosen["audio"] or chosen["video"]):
            chosen["audio"] = next((name for name in PATHS if name in fields), None)
    if AUTO in source.texts:
        chosen["text"] = next((group for texts in TEXTS if (group := [name for name in texts if name in fields])), [])
    hint = f"fields: {', '.join(fields) or 'none'}. Set source.text, source.images, source.audio or source.video"
    if not any(chosen.values()):
        raise UserError(f"source.path={source.path}: no field has a known name; {hint}")
    if source.SPARSE:
        # Later records may have media that the first lack.
        chosen |= {kind: MEDIA[kind][0] for kind in MEDIA if getattr(source, kind) == AUTO and not chosen[kind]}
        return replace(source, **chosen)
    named_source = replace(source, **chosen)
    missing = [name for name in named_source.names if name not in fields]
    if fields and missing:
        raise UserError(f"source.path={source.path}: has no field {missing[0]}; {hint}")
    return named_source


def _check_read(kind: str, chosen: str | None, fields: Mapping[str, Mapping[str, str]]) -> None:
    """Raise ``UserError`` if values look like names of files of a kind, and no row has the field that is read."""
    if VALUE in fields.get(chosen or "", ()):
        return
    for field, held in fields.items():
        name = held.get(kind, " ")
        if not any(map(str.isspace, name)):
            raise UserError(
                f"source.{kind}={chosen or AUTO}: finds no {kind}, but the field {field} names some ({name[:60]}). "
                f"Set source.{kind}={field}, or null to leave them out"
            )


def kind_of(name: str) -> str | None:
    """Return the kind of a file by the ending of its name: images, audio, video, or None."""
    ending = name.rpartition(".")[2].lower()
    return next((kind for kind, known in ENDINGS.items() if ending in known), None)


def _file_name(value: Any) -> str:
    """Return the file name in a value: itself, the first of a list, or its ``path``; empty if there is none."""
    value = value[0] if isinstance(value, list) and value else value
    name = value.get("path") if isinstance(value, Mapping) else value
    return name if isinstance(name, str) and "." in name else ""


def _medium(value: Any, name: str | None, folder: str, content: bool) -> Medium:
    if isinstance(value, bytes | Section):
        return value
    if isinstance(value, str):
        return inside(folder, value)
    if isinstance(value, Mapping):
        if value.get("bytes") is not None:
            return _medium(value["bytes"], name, folder, content)
        path = value.get("path")
        size = _stated_size(value)
        if size and not (isinstance(path, str) and content):
            return Known(*size)
        if isinstance(path, str):
            return inside(folder, path)
    raise BadSampleError(Reason.RECORD, f"{name}: {type(value).__name__} is no content, file name or size")


def _stated_size(values: Mapping[str, Any]) -> tuple[int, int] | None:
    width = values.get("width")
    height = values.get("height")
    return (int(width), int(height)) if _is_number(width) and _is_number(height) else None


def _texts(value: Any, name: str, depth: int) -> Iterator[str]:
    """Yield the texts of a value: itself, or those of its turns."""
    if value is None:
        return
    if isinstance(value, str):
        # LLaVA's files mark the places of media, whose tokens are counted as the media's.
        yield _PLACEHOLDER.sub("", value) if "<" in value else value
    elif depth and isinstance(value, Mapping | list | tuple):
        for turn in map(value.get, TURN_KEYS) if isinstance(value, Mapping) else value:
            yield from _texts(turn, name, depth - 1)
    else:
        raise BadSampleError(Reason.RECORD, f"{name}: {type(value).__name__} is no text or conversation")


def _listed(row: Row, name: str | None) -> list[Any]:
    """Return the values of a field, of which a list holds several."""
    value = row.get(name) if name else None
    if value is None or value == "":
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**53


def data_files(path: str, suffixes: Sequence[str], take: Take) -> list[Shard]:
    """Find files by name: one file, all in a folder, or a pattern; ``UserError`` if there are none.

    A file's label is its path below the folder that all have in common, its version are its bytes and last change.
    """
    place = Path(path).expanduser()
    pattern = glob.escape(str(place)) + "/**/*" if place.is_dir() else str(place)
    names = sorted(Path(name) for name in glob.iglob(pattern, recursive=True))  # noqa: PTH207
    files = [file for file in names if file.name.endswith(tuple(suffixes)) and file.is_file()]
    if place.is_file():
        files = [place]
    if not files:
        what = "has no" if place.is_dir() else "does not exist. Must be a folder, a file or a pattern of"
        raise UserError(f"source.path={path}: {what} {' or '.join(suffixes)} files")
    base = place if place.is_dir() else Path(os.path.commonpath([file.parent for file in files]))
    return [
        Shard(file.relative_to(base).as_posix(), f"{file.stat().st_size}-{file.stat().st_mtime_ns}", str(file))
        for file in files[: num_taken(take, len(files))]
    ]


def inside(root: str, name: str) -> Path:
    """Return the regular file of a name below a root; ``BadSampleError`` for others, also behind links."""
    if "\0" in name or not name:
        raise BadSampleError(Reason.OUTSIDE, repr(name[:80]))
    if not root:
        raise BadSampleError(Reason.OUTSIDE, f"{name}: source.root says where its files are")
    base = os.path.realpath(root)
    if leaves_root(name.removeprefix(base + os.sep)):
        raise BadSampleError(Reason.OUTSIDE, name)
    try:
        path = Path(base, name).resolve(strict=True)
        # A pipe would block its reader.
        is_file = path.is_file()
    except (OSError, ValueError, RuntimeError) as error:
        raise BadSampleError(Reason.MISSING, name) from error
    if not path.is_relative_to(base):
        raise BadSampleError(Reason.OUTSIDE, f"{name}: a link")
    if not is_file:
        raise BadSampleError(Reason.MISSING, f"{name}: no regular file")
    return path


def leaves_root(name: str) -> bool:
    """Return whether a name is absolute or has ``..``, on any system."""
    parts = name.replace("\\", "/").split("/")
    return parts[0] == "" or ".." in parts or parts[0].endswith(":")
