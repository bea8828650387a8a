"""Rows to samples: which fields hold text, images, audio and video, and the names that they commonly have."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from entrain_bench.base.errors import UserError, require

from ..take import ALL, Take
from .files import DataFile, data_files, inside
from .interface import BadRecord, BadSampleError, Known, Limits, Medium, RawSample, Reason, Section, Shard, Source

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
# The endings of their values tell what these fields hold.
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

type Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Fields:
    """Names of fields; a record may lack any of them.

    An image, sound or video is content, a file's name below ``root``, both (Hugging Face), or width and height.
    ``content``: read the content even where a record states sizes.
    """

    text: tuple[str, ...] = ()
    images: str | None = None
    audio: str | None = None
    video: str | None = None
    seconds: str | None = None
    root: str = ""
    content: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """All fields that are read."""
        others = (self.images, self.audio, self.video, self.seconds)
        return tuple(dict.fromkeys([*self.text, *(name for name in others if name)]))

    def sample(self, key: str, row: Row) -> RawSample:
        """Return the sample of a row; ``BadSampleError`` for wrong types and names that leave the root."""
        texts = [text for name in self.text for text in _texts(row.get(name), name, _DEPTH)]
        images = [self._medium(value, self.images) for value in _listed(row, self.images)]
        seconds = row.get(self.seconds) if self.seconds else None
        if seconds is not None and not _is_number(seconds):
            raise BadSampleError(Reason.RECORD, f"{self.seconds}: {str(seconds)[:40]!r} is no number of seconds")
        audio = self._timed(self.audio, seconds, row)
        video = self._timed(self.video, seconds, row)
        return RawSample(key, texts, images, audio, video, None if seconds is None else float(seconds))

    def _timed(self, name: str | None, seconds: float | None, row: Row) -> Medium | None:
        """Return a sound or video; if its length is known, it is not opened."""
        values = _listed(row, name)
        if len(values) > 1:
            raise BadSampleError(Reason.RECORD, f"{name}: {len(values)} of them; a sample has one")
        if not values:
            return None
        if seconds is None or self.content:
            return self._medium(values[0], name)
        if not (_is_number(row.get("width")) and _is_number(row.get("height"))):
            return Known(seconds=float(seconds))
        return Known(int(row["width"]), int(row["height"]), float(seconds))

    def _medium(self, value: Any, name: str | None) -> Medium:
        if isinstance(value, bytes | Section):
            return value
        if isinstance(value, str):
            return inside(self.root, value)
        if isinstance(value, Mapping):
            if value.get("bytes") is not None:
                return self._medium(value["bytes"], name)
            named = isinstance(value.get("path"), str)
            sized = _is_number(value.get("width")) and _is_number(value.get("height"))
            if sized and not (named and self.content):
                return Known(int(value["width"]), int(value["height"]))
            if named:
                return inside(self.root, value["path"])
        raise BadSampleError(Reason.RECORD, f"{name}: {type(value).__name__} is no content, file name or size")


@dataclass(frozen=True, kw_only=True)
class FieldSource(ABC):
    """A source of rows; experiments/source/parquet.yaml explains the names of fields.

    Attributes:
        path: of the data.
        text: fields of text.
        images: field of images; None: none; ``auto``: found by ``recognised``.
        audio: field of the sound.
        video: field of the video.
        seconds: field with the length of the sound or video, which is then not opened.
        take: how much of the data (``Take``).
    """

    # Whether a row may lack fields that others have.
    SPARSE: ClassVar[bool] = False

    path: str
    text: Sequence[str] | str | None = ()
    images: str | None = None
    audio: str | None = None
    video: str | None = None
    seconds: str | None = None
    take: str = ALL

    def __post_init__(self) -> None:
        require(bool(self.fields_at().names), "source", "no fields", "at least one of text, images, audio, video")
        Take.parse(self.take, "source.take")

    def fields_at(self, place: str = "") -> Fields:  # noqa: ARG002
        """Return the fields of rows of a file or shard."""
        texts = (self.text,) if isinstance(self.text, str) else tuple(self.text or ())
        return Fields(texts, self.images, self.audio, self.video, self.seconds)

    def check_columns(self, columns: Sequence[str], place: object) -> None:
        """Raise ``UserError`` for a field that is no column of the data at a place."""
        missing = [name for name in self.fields_at().names if name not in columns]
        if missing:
            raise UserError(
                f"source: {place} has no column {missing[0]}; columns: {', '.join(columns)} "
                "(source.text, source.images, source.audio, source.video name them, null: none)"
            )

    @abstractmethod
    def head(self) -> tuple[Collection[str], Sequence[Row]]:
        """Return the names of all fields, and some of the first rows."""

    @abstractmethod
    def shards(self) -> list[Shard]:
        """Return all shards, in a fixed order."""

    @abstractmethod
    def rows(self, shard: Shard, limits: Limits) -> Iterator[tuple[str, Row | BadSampleError]]:
        """Read the rows of a shard, each with its name for messages."""

    def samples(self, shard: Shard, limits: Limits) -> Iterator[RawSample | BadRecord]:
        """Read the samples of a shard."""
        fields = self.fields_at(shard.place)
        for key, row in self.rows(shard, limits):
            yield _record(fields, key, row)


@dataclass(frozen=True, kw_only=True)
class FileSource(FieldSource):
    """Local files whose rows can be read in any order."""

    ENDINGS: ClassVar[Sequence[str]] = ()

    def files(self) -> list[DataFile]:
        """Return the files that are taken; ``UserError`` if there are none."""
        return data_files(self.path, self.ENDINGS, Take.parse(self.take, "source.take"))

    @abstractmethod
    def row(
        self, file: DataFile, number: int, names: Sequence[str], limits: Limits
    ) -> tuple[str, Row | BadSampleError]:
        """Read one row's fields by its number in the file, with its name for messages."""

    def record(self, file: DataFile, number: int, limits: Limits, *, text_only: bool = False) -> RawSample:
        """Read one sample with its media's content, or its text only; ``BadSampleError`` if there is none."""
        fields = self.fields_at(str(file.path))
        fields = Fields(fields.text) if text_only else replace(fields, content=True)
        found = _record(fields, *self.row(file, number, fields.names, limits))
        if isinstance(found, BadRecord):
            raise found.error
        return found


def _record(fields: Fields, key: str, row: Row | BadSampleError) -> RawSample | BadRecord:
    if isinstance(row, BadSampleError):
        return BadRecord(key, row)
    try:
        return fields.sample(key, row)
    except BadSampleError as error:
        return BadRecord(key, error)


def recognised(source: Source) -> Source:
    """Return the source with names of its data's fields in place of ``auto``.

    Raises:
        UserError: if no field has a known name, or rows name media that no field would read.
    """
    if not isinstance(source, FieldSource) or AUTO not in source.fields_at().names:
        return source
    names, rows = source.head()
    chosen: dict[str, Any] = {kind: getattr(source, kind) for kind in (*MEDIA, "seconds", "text")}
    for kind, known in MEDIA.items():
        if chosen[kind] == AUTO:
            chosen[kind] = next((name for name in known if name in names and _may_hold(kind, name, rows)), None)
        elif chosen[kind] is None:
            continue
        _check_read(kind, chosen[kind], rows)
    if chosen["seconds"] == AUTO:
        chosen["seconds"] = next((name for name in SECONDS if name in names), None)
        # A path with any ending is a sound's if a length stands next to it.
        if chosen["seconds"] and source.audio == AUTO and not (chosen["audio"] or chosen["video"]):
            chosen["audio"] = next((name for name in PATHS if name in names), None)
    if AUTO in source.fields_at().text:
        chosen["text"] = next((group for texts in TEXTS if (group := [name for name in texts if name in names])), [])
    if not any(chosen.values()):
        raise UserError(
            f"source.path={source.path}: no field has a known name; fields: {', '.join(names) or 'none'}. "
            "Set source.text, source.images, source.audio or source.video"
        )
    if source.SPARSE:
        # Later records may have media that the first lack.
        chosen |= {kind: MEDIA[kind][0] for kind in MEDIA if getattr(source, kind) == AUTO and not chosen[kind]}
    return replace(source, **chosen)


def _may_hold(kind: str, name: str, rows: Sequence[Row]) -> bool:
    return name not in PATHS or any(kind_of(_file_name(row.get(name))) == kind for row in rows)


def _check_read(kind: str, chosen: str | None, rows: Sequence[Row]) -> None:
    """Raise ``UserError`` if values look like names of files of a kind, and no row has the field that is read."""
    if any(row.get(chosen or "") not in (None, "", []) for row in rows):
        return
    for field, value in (pair for row in rows for pair in row.items()):
        name = _file_name(value)
        if kind_of(name) == kind and not any(map(str.isspace, name)):
            raise UserError(
                f"source.{kind}={chosen or AUTO}: finds no {kind}, but the field {field} names some ({name[:60]}). "
                f"Set source.{kind}={field}, or null to leave them out"
            )


def kind_of(name: str) -> str | None:
    """Return what a file holds by the ending of its name: images, audio, video, or None."""
    ending = name.rpartition(".")[2].lower()
    return next((kind for kind, known in ENDINGS.items() if ending in known), None)


def _file_name(value: Any) -> str:
    """Return the file name in a value: itself, the first of a list, or its ``path``; empty if there is none."""
    value = value[0] if isinstance(value, list) and value else value
    name = value.get("path") if isinstance(value, Mapping) else value
    return name if isinstance(name, str) and "." in name else ""


def _texts(value: Any, name: str, depth: int) -> Iterator[str]:
    """Yield the texts of a value: itself, or those of its turns."""
    if value is None:
        return
    if isinstance(value, str):
        # LLaVA's files mark the places of media, whose tokens are counted as the media's.
        yield _PLACEHOLDER.sub("", value) if "<" in value else value
    elif depth and isinstance(value, Mapping):
        for key in TURN_KEYS:
            yield from _texts(value.get(key), name, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for turn in value:
            yield from _texts(turn, name, depth - 1)
    else:
        raise BadSampleError(Reason.RECORD, f"{name}: {type(value).__name__} is no text or conversation")


def _listed(row: Row, name: str | None) -> list[Any]:
    """Return the values of a field, of which a list holds several."""
    value = row.get(name) if name else None
    if value is None or value == "":
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**53
