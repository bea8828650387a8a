"""Rows and records to samples: which of their fields hold text, images, audio and video."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from entrain_bench.base.errors import require

from ..take import ALL, Take
from .files import DataFile, data_files
from .interface import BadRecord, BadSampleError, Known, Medium, RawSample, Reason
from .paths import inside

# What turns of a conversation are made of, in FineVision, LLaVA and chat templates.
TURN_KEYS = ("user", "assistant", "value", "content", "text", "question", "answer")
_PLACEHOLDER = re.compile("<(?:image|video|audio)>\n?")
_DEPTH = 8


@dataclass(frozen=True, slots=True)
class Fields:
    """Names of fields; what a record does not have, it has none of.

    An image, sound or video is content, a file's name below ``root``, both (Hugging Face), or width and height.
    ``content``: it is wanted where a record states sizes as well.
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

    def reading(self, *, text_only: bool) -> Fields:
        """The same fields where content is wanted, or that of texts alone."""
        if text_only:
            return Fields(self.text)
        return replace(self, content=True)

    def record(self, key: str, row: Mapping[str, Any]) -> RawSample | BadRecord:
        """The sample of a row, or what is wrong with it."""
        try:
            return self.sample(key, row)
        except BadSampleError as error:
            return BadRecord(key, error)

    def sample(self, key: str, row: Mapping[str, Any]) -> RawSample:
        """The sample of a row; ``BadSampleError`` for values of other types, and names that leave the root."""
        texts = [text for name in self.text for text in _texts(row.get(name), name, _DEPTH)]
        images = [self._medium(value, self.images or "") for value in _listed(row.get(self.images or ""))]
        seconds = self._seconds(row)
        sounds, videos = (
            [self._timed(value, name or "", seconds, row) for value in _listed(row.get(name or ""))]
            for name in (self.audio, self.video)
        )
        for name, found in ((self.audio, sounds), (self.video, videos)):
            if len(found) > 1:
                raise BadSampleError(Reason.RECORD, f"{name}: {len(found)} of them; a sample has one")
        return RawSample(key, texts, images, next(iter(sounds), None), next(iter(videos), None), seconds)

    def _seconds(self, row: Mapping[str, Any]) -> float | None:
        value = row.get(self.seconds) if self.seconds else None
        if value is not None and not _is_number(value):
            raise BadSampleError(Reason.RECORD, f"{self.seconds}: {str(value)[:40]!r} is no number of seconds")
        return None if value is None else float(value)

    def _timed(self, value: Any, name: str, seconds: float | None, row: Mapping[str, Any]) -> Medium:
        """A sound or a video; of known length it is not opened, and its frames have the size that the record states."""
        if seconds is None or self.content:
            return self._medium(value, name)
        sides = [row.get(side) for side in ("width", "height")]
        known = all(_is_number(side) for side in sides)
        width, height = (int(side) if known else 0 for side in sides)  # type: ignore[arg-type]
        return Known(width, height, seconds)

    def _medium(self, value: Any, name: str) -> Medium:
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value)
        if isinstance(value, str):
            return inside(self.root, value)
        if isinstance(value, Mapping):
            if value.get("bytes") is not None:
                return self._medium(value["bytes"], name)
            named = isinstance(value.get("path"), str)
            sized = _is_number(value.get("width"))
            if sized and _is_number(value.get("height")) and not (named and self.content):
                return Known(int(value["width"]), int(value["height"]))
            if named:
                return inside(self.root, value["path"])
        raise BadSampleError(Reason.RECORD, f"{name}: {type(value).__name__} is no content, file name or size")


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldSource(ABC):
    """A source whose rows or records have fields, by names that experiments/source/parquet.yaml explains; None: none.

    A name ``auto`` is found (``known``). Where a record states the ``seconds`` of a sound or video, no file is opened,
    and the size of a video's frames is its ``width`` and ``height``.
    """

    # Endings of files, and whether a row may lack fields that others have.
    ENDINGS: ClassVar[Sequence[str]] = ()
    SPARSE: ClassVar[bool] = False

    path: str
    text: Sequence[str] | str = ()
    images: str | None = None
    audio: str | None = None
    video: str | None = None
    seconds: str | None = None
    take: str = ALL

    def __post_init__(self) -> None:
        require(bool(self.fields().names), "source", "no fields", "at least one of text, images, audio, video")
        self.taken()

    def taken(self) -> Take:
        """How many of the files."""
        return Take.parse(self.take, "source.take")

    def files(self) -> list[DataFile]:
        """The files that are taken; ``UserError`` if there are none."""
        return data_files(self.path, self.ENDINGS, self.taken())

    def fields(self, root: str = "") -> Fields:
        """The fields of rows whose files are below a folder."""
        texts = (self.text,) if isinstance(self.text, str) else tuple(self.text)
        return Fields(texts, self.images, self.audio, self.video, self.seconds, root)

    @abstractmethod
    def head(self) -> tuple[Collection[str], Sequence[Mapping[str, Any]]]:
        """The names of all fields, and some of the first rows."""


def _texts(value: Any, name: str, depth: int) -> Iterator[str]:
    """The texts of a value: itself, those of its turns."""
    if value is None:
        return
    if isinstance(value, str):
        # Which stands where the image goes, in LLaVA's files; its tokens are the image's.
        yield _PLACEHOLDER.sub("", value) if "<" in value else value
    elif depth and isinstance(value, Mapping):
        for key in TURN_KEYS:
            if key in value:
                yield from _texts(value[key], name, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for turn in value:
            yield from _texts(turn, name, depth - 1)
    else:
        raise BadSampleError(Reason.RECORD, f"{name}: {type(value).__name__} is no text or conversation")


def _listed(value: Any) -> list[Any]:
    if value is None or value == "":
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**53
