"""The sample of a row: texts and media, found by conventions, and fields that are not counted."""

import base64
import json
import os
import re
from binascii import Error as Base64Error
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeGuard

from .conventions import AUTO, KINDS, Chosen, kind_of, roles_of, table_of
from .source import BadSampleError, Reason

# A value that a reader did not read: a column or a member of bytes with an unknown name.
UNREAD = object()
# Where a part or a struct holds its medium.
_PLACES = ("bytes", "path", "url", "base64", "data", "image", "file", "file_name", "image_name", "image_path", "source")
# Fields whose names are the roles of their texts.
_SPEAKERS = ("system", "user", "assistant")
_DEPTH = 12
# Characters of a role or an id.
_MAX_NAME = 64
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]{200}")
_URLS = ("http://", "https://", "s3://", "gs://")


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


@dataclass(slots=True)
class RawSample:
    """A sample, not decoded; texts are tokenized one by one, ``seconds`` is the stated length of the sound or video.

    ``left`` are fields that are not counted: of each kind (``text`` or a medium) the characters or values by field.
    ``marks`` is the number of places in texts that mark media, 0 if they are not compared. ``turns`` are the roles of
    turns, with the number of texts before each.
    """

    texts: list[str] = field(default_factory=list)
    images: list[Medium] = field(default_factory=list)
    audio: list[Medium] = field(default_factory=list)
    video: list[Medium] = field(default_factory=list)
    seconds: float | None = None
    marks: int = 0
    left: dict[tuple[str, str], int] = field(default_factory=dict)
    turns: list[tuple[str, int]] = field(default_factory=list)

    @property
    def num_media(self) -> int:
        """All images, sounds and videos."""
        return len(self.images) + len(self.audio) + len(self.video)


def sample_of(row: Row | list[Any], chosen: Chosen, folder: str) -> RawSample:
    """Return the sample of a row; ``BadSampleError`` for wrong types, and for names of files that leave the folder."""
    if isinstance(row, list):
        row = {"json": row}
    if inner := {name: _inner(row, name.split(".")) for name in chosen.names if "." in name}:
        row = {**row, **inner}
    names = tuple(name for name, value in row.items() if value is not None and value != "" and value != [])
    roles = roles_of(names, chosen)
    reading = _Reading(chosen, roles)
    for name in names:
        reading.field(name, row[name], roles.get(name))
    sample = reading.sample
    for kind, found in reading.media.items():
        if kind != "images" and len(found) == 1 and sample.seconds is not None:
            getattr(sample, kind).append(Known(*(_stated_size(row) or (0, 0)), sample.seconds))
        else:
            getattr(sample, kind).extend(medium_of(value, name, folder) for name, value in found)
    return sample


def _inner(value: Any, keys: Sequence[str]) -> Any:
    """Return the value of a field of a field, also of each entry of a list."""
    if isinstance(value, list | tuple):
        each = (_inner(entry, keys) for entry in value)
        return [one for entry in each for one in (entry if isinstance(entry, list) else [entry])]
    if not keys:
        return value
    return _inner(value.get(keys[0]), keys[1:]) if isinstance(value, dict) else None


class _Reading:
    """The sample of a row so far, and the media that it names, by kind."""

    def __init__(self, chosen: Chosen, roles: Mapping[str, str]) -> None:
        self.sample = RawSample()
        self.media: dict[str, list[tuple[str, Any]]] = {kind: [] for kind in KINDS}
        self._chosen = chosen
        self._roles = roles.values()
        self._table = table_of(chosen.conventions)

    def field(self, name: str, value: Any, role: str | None) -> None:
        """Add a field of the row."""
        if role == "path":
            role = kind_of(_file_name(value))
            # A URL with another ending may be a page.
            if role is None and "seconds" in self._roles and isinstance(value, str) and "://" not in value:
                role = "audio"
            # Another field holds that kind, or it is not wanted.
            if role and (role in self._roles or getattr(self._chosen, role) != AUTO):
                role = None
        if role == "seconds":
            if not is_number(value):
                raise BadSampleError(Reason.RECORD, f"{name}: {str(value)[:40]!r} is no number of seconds")
            self.sample.seconds = float(value)
        elif role == "one" and isinstance(listed := _parsed(value), list) and listed:
            self._add("text", name, listed[0])
            self._add(None, f"{name} after the first", listed[1:])
        elif role in ("text", "one"):
            if name == "system":
                self._speaks(name)
            # Turns may be JSON in a text.
            parsed = _parsed(value)
            turns = parsed if isinstance(parsed, list) else [parsed]
            are_turns = all(isinstance(each, dict) and "text" in map(self._table.turns.get, each) for each in turns)
            self._add("text", name, parsed if are_turns else value)
        else:
            self._add(role, name, _parsed(value) if role in KINDS else value)

    def _add(self, role: str | None, name: str, value: Any, depth: int = _DEPTH) -> None:
        """Add a value in its role; without one it is not counted."""
        if isinstance(value, str) and role == "text":
            self.sample.texts.append(self._table.marks.sub(self._mark, value) if "<" in value else value)
        elif value is None or (value is UNREAD and role == "text") or value != value:
            return
        elif role in KINDS:
            self._medium(role, name, value)
        elif role == "json":
            plain = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=lambda _: "")
            self.sample.texts.append(plain)
        elif isinstance(value, list | tuple) and depth:
            for each in value:
                self._add(role, name, each, depth - 1)
        elif isinstance(value, dict) and depth and role == "text":
            self._turn(name, value, depth - 1)
        elif isinstance(value, dict) and depth:
            for key, each in value.items():
                self._add(None, name if key in ("bytes", "path") else f"{name}.{key}", each, depth - 1)
        elif role != "text":
            self._leave(name, value)
        elif isinstance(value, bool | int | float):
            self.sample.texts.append(str(value))
        else:
            raise BadSampleError(Reason.RECORD, f"{name}: {type(value).__name__} is no text or conversation")

    def _turn(self, name: str, turn: Mapping[str, Any], depth: int) -> None:
        """Add a turn, or a part of one whose type may say that it is a medium."""
        turns = self._table.turns
        kind = self._table.types.get(str(turn.get("type")))
        media = [key for key, value in turn.items() if turns.get(key) in KINDS and value not in (None, "", [])]
        if kind and not media:
            media = [key for key in _PLACES if turn.get(key)]
            # Without the medium, the part is a mark of one that another field holds.
            self.sample.marks += self._chosen.compares and not media
        if role := turn.get("role") or turn.get("from"):
            self._speaks(str(role))
        for key, value in turn.items():
            own = turns.get(key)
            if own == "text" and key in _SPEAKERS:
                self._speaks(key)
            if key in media:
                self._medium(kind or own or "", f"{name}.{key}", value)
            elif own not in KINDS and not (own == "none" and _is_name(value)):
                self._add(own, f"{name}.{key}", value, depth)

    def _speaks(self, role: str) -> None:
        self.sample.turns.append((role, len(self.sample.texts)))

    def _medium(self, kind: str, name: str, value: Any) -> None:
        """Add the media of a value; nulls of a list are none."""
        values = value if isinstance(value, list | tuple) else [value]
        found = [each for each in values if not _is_nothing(each)]
        if kind == "video" and found and all(kind_of(_file_name(each)) == "images" for each in found):
            hint = f"Set source.video=null source.images={name} to count frames as images"
            raise BadSampleError(Reason.RECORD, f"{name}: {len(found)} images in place of a video. {hint}")
        self.media[kind] += [(name, each) for each in found]

    def _mark(self, match: re.Match[str]) -> str:
        """Count a mark of a text, which is no text itself; ``<img>`` has the name of its image."""
        if match["path"]:
            self._medium("images", "<img>", match["path"].strip())
        else:
            self.sample.marks += self._chosen.compares
        return ""

    def _leave(self, name: str, value: Any) -> None:
        """Note a value that is not counted, if it holds text or media."""
        if "." in name and name in self._chosen.names:
            return
        kind = "text"
        amount = 1
        if isinstance(value, str):
            file_kind = kind_of(value) if "." in value[-6:] and not any(map(str.isspace, value)) else None
            kind = "images" if value.startswith("data:image") else file_kind or "text"
            amount = len(value) if kind == "text" else 1
        elif isinstance(value, bytes) or value is UNREAD:
            kind = "bytes"
        elif isinstance(value, dict | list | tuple):
            name = f"{name} (nested deeper)"
            amount = len(str(value))
        else:
            return
        if amount:
            self.sample.left[kind, name] = self.sample.left.get((kind, name), 0) + amount


def _is_name(value: Any) -> bool:
    """Whether a value may be a role or an id."""
    return not isinstance(value, list | tuple | dict) and len(str(value)) <= _MAX_NAME


def _is_nothing(value: Any) -> bool:
    """Whether an entry of a list of media holds none."""
    return value in (None, "") or (isinstance(value, dict) and all(each is None for each in value.values()))


def _parsed(value: Any) -> Any:
    """Return the value of JSON in a text that is a list or a mapping; other values themselves."""
    if isinstance(value, str) and value[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def medium_of(value: Any, name: str, folder: str) -> Medium:
    """Return the medium of a value: content, also in base64, a file's name, or stated sizes.

    ``BadSampleError`` for other values.
    """
    if isinstance(value, bytes | Section | Path):
        return value
    if isinstance(value, str):
        head, comma, encoded = value.partition(",") if value.startswith("data:") else ("", "", value)
        if value.startswith(_URLS):
            raise BadSampleError(Reason.URL, value[:80])
        if not comma and not _BASE64.match(value):
            return inside(folder, value.removeprefix("file://"))
        try:
            return base64.b64decode(encoded)
        except (Base64Error, ValueError) as error:
            raise BadSampleError(Reason.RECORD, f"{name}: no base64 behind {head[:40]!r}: {error}") from error
    if isinstance(value, dict):
        place = next((key for key in _PLACES if value.get(key) is not None), None)
        size = _stated_size(value)
        if size and place != "bytes":
            return Known(*size)
        if is_number(rate := value.get("sampling_rate")) and rate and isinstance(wave := value.get("array"), list):
            return Known(seconds=len(wave) / rate)
        if place:
            return medium_of(value[place], name, folder)
    raise BadSampleError(Reason.RECORD, f"{name}: {type(value).__name__} is no content, file name or size")


def _file_name(value: Any) -> str:
    """Return the file name in a value: itself, the first of a list, or its ``path``; empty if there is none."""
    value = value[0] if isinstance(value, list) and value else value
    name = value.get("path") if isinstance(value, dict) else value
    return name if isinstance(name, str) and "." in name else ""


def _stated_size(values: Row) -> tuple[int, int] | None:
    width, height = values.get("width"), values.get("height")
    return (int(width), int(height)) if is_number(width) and is_number(height) else None


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a number that sizes can have."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**53


@lru_cache(maxsize=4096)
def _real(folder: str) -> str:
    """Return a folder without links and with a slash at its end; the system looks at each of its levels."""
    return os.path.realpath(folder).rstrip(os.sep) + os.sep


def inside(root: str, name: str) -> Path:
    """Return the regular file of a name below a root; ``BadSampleError`` for others, also behind links."""
    if "\0" in name or not name:
        raise BadSampleError(Reason.OUTSIDE, repr(name[:80]))
    if not root:
        raise BadSampleError(Reason.OUTSIDE, f"{name}: source.root says where its files are")
    base = _real(root)
    # A name may be absolute if it lies below the root.
    folder, _, last = (name if name.startswith("/") else base + name).rpartition("/")
    path = _real(folder or "/") + last
    is_link = os.path.islink(path)  # noqa: PTH114
    if is_link:
        path = os.path.realpath(path)
    if not path.startswith(base):
        hint = f" (source.root={root}; source.root=/ allows all)" if name.startswith("/") else ""
        raise BadSampleError(Reason.OUTSIDE, f"{name}: a link" if is_link else name + hint)
    # A pipe would block its reader.
    if not os.path.isfile(path):  # noqa: PTH113
        raise BadSampleError(Reason.MISSING, name)
    return Path(path)


def leaves_root(name: str) -> bool:
    """Return whether a name is absolute or has ``..``, on any system."""
    parts = name.replace("\\", "/").split("/")
    return parts[0] == "" or ".." in parts or parts[0].endswith(":")
