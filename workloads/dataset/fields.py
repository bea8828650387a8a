"""The sample of a row: texts and media, found by conventions (conventions.yaml), and fields that are not counted."""

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

import yaml

from entrain_bench.base.errors import UserError
from entrain_bench.specs.parse import check_mapping, parse

from .errors import BadSampleError, Reason

# In place of a field's name: where a convention has it.
AUTO = "auto"
KINDS = ("images", "audio", "video")
# A value that a reader did not read: a column or a member of bytes with an unknown name.
UNREAD = object()
# Fields of a sample that are not counted: how many keep their names; the others are summed.
_MAX_LEFT = 64
_DEPTH = 12
# Characters of a role or an id.
_MAX_NAME = 64
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]{200}")


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
    ``marks`` is the number of places in texts that mark media, -1 if they are not compared.
    """

    texts: Sequence[str] = ()
    images: Sequence[Medium] = ()
    audio: Medium | None = None
    video: Medium | None = None
    seconds: float | None = None
    marks: int = -1
    left: Mapping[tuple[str, str], int] = field(default_factory=dict)

    @property
    def unmatched(self) -> str:
        """How marks and media differ, in words; empty if they do not, or there are no marks."""
        found = len(self.images) + (self.audio is not None) + (self.video is not None)
        return f"{self.marks} marks, {found} media" if self.marks > 0 and self.marks != found else ""


@dataclass(frozen=True, slots=True)
class Convention:
    """A way to lay out rows, as conventions.yaml explains."""

    when: tuple[str, ...] = ()
    text: tuple[str, ...] = ()
    json: tuple[str, ...] = ()
    one: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    audio: tuple[str, ...] = ()
    video: tuple[str, ...] = ()

    def fits(self, names: Sequence[str]) -> bool:
        """Whether a row with these fields is of this convention."""
        return all(name in names for name in self.when) if self.when else any(n in names for n in self.text + self.one)


@dataclass(frozen=True)
class Table:
    """All that conventions.yaml states."""

    conventions: Mapping[str, Convention]
    turns: Mapping[str, str]
    types: Mapping[str, str]
    media: Mapping[str, Sequence[str]]
    paths: Sequence[str]
    seconds: Sequence[str]
    marks: re.Pattern[str]
    lists: Sequence[str]
    endings: Mapping[str, str]

    def media_names(self) -> set[str]:
        """All fields that hold media."""
        own = (name for one in self.conventions.values() for kind in KINDS for name in getattr(one, kind))
        return {*self.paths, *own, *(name for names in self.media.values() for name in names)}


@lru_cache(maxsize=8)
def table_of(path: str | None) -> Table:
    """The conventions of the suite, after those of a file; ``UserError`` for a file that states none."""
    own = yaml.safe_load(Path(__file__).with_name("conventions.yaml").read_text())
    given: Mapping[str, Any] = {}
    if path is not None:
        where = f"source.conventions={path}"
        try:
            given = check_mapping(yaml.safe_load(Path(path).expanduser().read_text()), where)
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise UserError(f"{where}: cannot be read ({' '.join(str(error).split())[:120]})") from error
        if unknown := [key for key in given if key not in ("conventions", "turns", "types")]:
            raise UserError(f"{where}: {unknown[0]}: unknown. Must be conventions, turns or types")
    parts = {key: {**check_mapping(given.get(key, {}), key), **own[key]} for key in ("conventions", "turns", "types")}
    conventions = {
        name: parse(Convention, given.get("conventions", {}).get(name, values), f"conventions.{name}")
        for name, values in parts["conventions"].items()
    }
    turns, types = (
        {name: role for source in (own, given) for role, names in source.get(key, {}).items() for name in names}
        for key in ("turns", "types")
    )
    marks = "|".join(f"(?:{pattern})" for pattern in own["marks"].values())
    endings = {ending: kind for kind, names in own["endings"].items() for ending in names}
    pattern = re.compile(rf"(?:<img>(?P<path>[^<>]+)</img>|{marks})\n?")
    return Table(conventions, turns, types, own["media"], own["paths"], own["seconds"], pattern, own["lists"], endings)


def kind_of(name: str) -> str | None:
    """Return the kind of a file by the ending of its name: images, audio, video, or None."""
    return table_of(None).endings.get(name.rpartition(".")[2].lower())


@dataclass(frozen=True, slots=True)
class Chosen:
    """Names of fields that the user chose: of text, of each kind of medium, and of lengths; ``auto``: by convention."""

    text: tuple[str, ...] = (AUTO,)
    images: str | None = AUTO
    audio: str | None = AUTO
    video: str | None = AUTO
    seconds: str | None = AUTO
    compare: bool = True
    conventions: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """All names that are given."""
        given = (getattr(self, kind) for kind in (*KINDS, "seconds"))
        return tuple(dict.fromkeys(name for name in (*self.text, *given) if name not in (None, AUTO)))


@lru_cache(maxsize=4096)
def roles_of(names: tuple[str, ...], chosen: Chosen) -> Mapping[str, str]:
    """The role of each field of a row: text, json, one (of a list), images, audio, video, path, seconds."""
    table = table_of(chosen.conventions)
    convention = next((each for each in table.conventions.values() if each.fits(names)), Convention())
    roles = dict[str, str]()
    if AUTO in chosen.text:
        roles |= {name: role for role in ("json", "one", "text") for name in getattr(convention, role)}
    roles |= {name: "text" for name in chosen.text if name != AUTO}
    roles |= {name: "path" for name in table.paths if name not in roles}
    for kind in KINDS:
        name = getattr(chosen, kind)
        known = (*getattr(convention, kind), *table.media[kind]) if name == AUTO else (name,)
        found = next((each for each in known if each in names and roles.get(each, "path") == "path"), None)
        if found:
            roles[found] = kind
    found = next((n for n in table.seconds if n in names), None) if chosen.seconds == AUTO else chosen.seconds
    if found:
        roles[found] = "seconds"
    return {name: role for name, role in roles.items() if name in names}


def sample_of(row: Row | list[Any], chosen: Chosen, folder: str, content: bool = False) -> RawSample:
    """Return the sample of a row; ``content``: also where the row states sizes.

    ``BadSampleError`` for wrong types, and for names of files that leave the folder.
    """
    if isinstance(row, list):
        row = {"json": row}
    if inner := {name: _inner(row, name.split(".")) for name in chosen.names if "." in name}:
        row = {**row, **inner}
    names = tuple(name for name, value in row.items() if value is not None and value != "" and value != [])
    return _Reading(row, roles_of(names, chosen), chosen, folder, content).sample(names)


def _inner(value: Any, keys: Sequence[str]) -> Any:
    """The value of a field of a field, also of each entry of a list."""
    if isinstance(value, list | tuple):
        each = (_inner(entry, keys) for entry in value)
        return [one for entry in each for one in (entry if isinstance(entry, list) else [entry])]
    if not keys:
        return value
    return _inner(value.get(keys[0]), keys[1:]) if isinstance(value, Mapping) else None


class _Reading:
    """The texts and media found in a row so far, and its fields that are not counted."""

    def __init__(self, row: Row, roles: Mapping[str, str], chosen: Chosen, folder: str, content: bool) -> None:
        self._row = row
        self._roles = roles
        self._chosen = chosen
        self._folder = folder
        self._content = content
        self._table = table_of(chosen.conventions)
        self._texts = list[str]()
        self._media: dict[str, list[tuple[str, Any]]] = {kind: [] for kind in KINDS}
        self._marks = 0
        self._left = dict[tuple[str, str], int]()

    def sample(self, names: Sequence[str]) -> RawSample:
        """Return the sample."""
        for name in names:
            self._field(name, self._row[name], self._roles.get(name))
        seconds = next((self._row[name] for name, role in self._roles.items() if role == "seconds"), None)
        if seconds is not None and not is_number(seconds):
            raise BadSampleError(
                Reason.RECORD, f"{self._chosen.seconds}: {str(seconds)[:40]!r} is no number of seconds"
            )
        length = None if seconds is None else float(seconds)
        images = [medium_of(value, name, self._folder, self._content) for name, value in self._media["images"]]
        audio, video = (self._timed(kind, length) for kind in ("audio", "video"))
        compared = self._chosen.compare and None not in (getattr(self._chosen, kind) for kind in KINDS)
        return RawSample(self._texts, images, audio, video, length, self._marks if compared else -1, self._left)

    def _timed(self, kind: str, seconds: float | None) -> Medium | None:
        values = self._media[kind]
        if not values:
            return None
        name, value = values[0]
        if len(values) > 1:
            frames = all(kind_of(_file_name(each)) == "images" for _, each in values)
            hint = f". Set source.video=null source.images={name} to count frames as images" if frames else ""
            raise BadSampleError(Reason.RECORD, f"{name}: {len(values)} of them; a sample has one{hint}")
        if seconds is not None and not self._content:
            return Known(*(_stated_size(self._row) or (0, 0)), seconds)
        return medium_of(value, name, self._folder, self._content)

    def _field(self, name: str, value: Any, role: str | None) -> None:
        if role == "path":
            role = kind_of(_file_name(value))
            if role is None and "seconds" in self._roles.values() and isinstance(value, str):
                role = "audio"
            # Another field holds that kind, or it is not wanted.
            if role and (role in self._roles.values() or getattr(self._chosen, role) != AUTO):
                role = None
        if role in KINDS:
            self._add(role, name, _parsed(value))
        elif role == "one" and isinstance(value := _parsed(value), list):
            self._text(name, value[0], _DEPTH)
            for other in value[1:]:
                self._leave(f"{name} after the first", other, _DEPTH)
        elif role == "json":
            self._json(value)
        elif role in ("text", "one"):
            self._text(name, _turns(value, self._table), _DEPTH)
        elif role is None:
            self._leave(name, value, _DEPTH)

    def _add(self, kind: str, name: str, value: Any) -> None:
        values = value if isinstance(value, list | tuple) else [value]
        self._media[kind] += [(name, each) for each in values if not _is_nothing(each)]

    def _json(self, value: Any) -> None:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=lambda _: "")
        self._texts.append(text)

    def _text(self, name: str, value: Any, depth: int) -> None:
        """Take the texts and media of a value: itself, its turns, or their parts."""
        if value is None or value is UNREAD or value != value:
            return
        if isinstance(value, str):
            self._texts.append(self._unmarked(value) if "<" in value else value)
        elif isinstance(value, bool | int | float):
            self._texts.append(str(value))
        elif isinstance(value, list | tuple) and depth:
            for each in value:
                self._text(name, each, depth - 1)
        elif isinstance(value, Mapping) and depth:
            self._turn(name, value, depth - 1)
        else:
            raise BadSampleError(Reason.RECORD, f"{name}: {type(value).__name__} is no text or conversation")

    def _turn(self, name: str, turn: Mapping[str, Any], depth: int) -> None:
        kind = self._table.types.get(str(turn.get("type")))
        media = [
            key for key, value in turn.items() if self._table.turns.get(key) in KINDS and value not in (None, "", [])
        ]
        if kind:
            if not media:
                media = [key for key in _PLACES if turn.get(key)]
            # Without the medium, the part is a mark of one that another field holds.
            self._marks += not media
        for key, value in turn.items():
            role = self._table.turns.get(key)
            if key in media:
                self._add(kind or role or "", f"{name}.{key}", value)
            elif value is None or role in KINDS or (role == "none" and _is_short(value)):
                continue
            elif role == "text":
                self._text(f"{name}.{key}", value, depth)
            elif role == "json":
                self._json(value)
            else:
                self._leave(f"{name}.{key}", value, depth)

    def _unmarked(self, text: str) -> str:
        """Count the marks of a text, and return the text without them."""

        def taken(match: re.Match[str]) -> str:
            if match["path"]:
                self._add("images", "<img>", match["path"].strip())
            else:
                self._marks += 1
            return ""

        return self._table.marks.sub(taken, text)

    def _leave(self, name: str, value: Any, depth: int) -> None:
        """Note a field that is not counted, if it holds text or media."""
        if "." in name and name in self._chosen.names:
            return
        if isinstance(value, str):
            file_kind = kind_of(value) if "." in value[-6:] and not any(map(str.isspace, value)) else None
            kind = "images" if value.startswith("data:image") else file_kind or "text"
            amount = len(value) if kind == "text" else 1
        elif isinstance(value, bytes) or value is UNREAD:
            kind, amount = "bytes", 1
        elif isinstance(value, Mapping) and depth:
            for key, each in value.items():
                self._leave(name if key in ("bytes", "path") else f"{name}.{key}", each, depth - 1)
            return
        elif isinstance(value, list | tuple) and depth:
            for each in value:
                self._leave(name, each, depth - 1)
            return
        elif isinstance(value, Mapping | list | tuple):
            kind, name, amount = "text", f"{name} (nested deeper)", len(str(value))
        else:
            return
        key = (kind, name if (kind, name) in self._left or len(self._left) < _MAX_LEFT else "others")
        if amount:
            self._left[key] = self._left.get(key, 0) + amount


# Where a part or a struct holds its medium.
_PLACES = ("bytes", "path", "url", "base64", "data", "image", "file", "file_name", "image_name", "image_path", "source")


def _is_nothing(value: Any) -> bool:
    """Whether an entry of a list of media holds none."""
    return value in (None, "") or (isinstance(value, Mapping) and all(each is None for each in value.values()))


def _is_short(value: Any) -> bool:
    """Whether a value may be a role or an id."""
    return not isinstance(value, list | tuple | Mapping) and len(str(value)) <= _MAX_NAME


def _parsed(value: Any) -> Any:
    """The value of JSON in a text that is a list or a mapping; other values themselves."""
    if isinstance(value, str) and value[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _turns(value: Any, table: Table) -> Any:
    """Turns that are JSON in a text; other values themselves."""
    parsed = _parsed(value)
    if parsed is not value:
        turns = parsed if isinstance(parsed, list) else [parsed]
        if all(isinstance(each, Mapping) and any(table.turns.get(key) == "text" for key in each) for each in turns):
            return parsed
    return value


def medium_of(value: Any, name: str, folder: str, content: bool) -> Medium:
    """The medium of a value: content, also in base64, a file's name, or stated sizes; ``BadSampleError`` for others."""
    if isinstance(value, bytes | Section | Path):
        return value
    if isinstance(value, str):
        return _named_medium(value, folder)
    if isinstance(value, Mapping):
        place = next((key for key in _PLACES if value.get(key) is not None), None)
        size = _stated_size(value)
        if size and not (place and (content or place == "bytes")):
            return Known(*size)
        if is_number(rate := value.get("sampling_rate")) and rate and isinstance(wave := value.get("array"), list):
            return Known(seconds=len(wave) / rate)
        if place:
            return medium_of(value[place], name, folder, content)
    raise BadSampleError(Reason.RECORD, f"{name}: {type(value).__name__} is no content, file name or size")


def _named_medium(value: str, folder: str) -> Medium:
    head, comma, encoded = value[:256].partition(",")
    if head.startswith("data:") and comma:
        encoded = value.partition(",")[2]
    elif not _BASE64.match(value):
        if head.startswith(("http://", "https://", "s3://", "gs://")):
            raise BadSampleError(Reason.URL, head[:80])
        return inside(folder, value.removeprefix("file://"))
    else:
        encoded = value
    try:
        return base64.b64decode(encoded)
    except (Base64Error, ValueError) as error:
        raise BadSampleError(Reason.RECORD, f"no base64: {error}") from error


def _file_name(value: Any) -> str:
    """Return the file name in a value: itself, the first of a list, or its ``path``; empty if there is none."""
    value = value[0] if isinstance(value, list) and value else value
    name = value.get("path") if isinstance(value, Mapping) else value
    return name if isinstance(name, str) and "." in name else ""


def _stated_size(values: Mapping[str, Any]) -> tuple[int, int] | None:
    width = values.get("width")
    height = values.get("height")
    return (int(width), int(height)) if is_number(width) and is_number(height) else None


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a number that sizes can have."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**53


def inside(root: str, name: str) -> Path:
    """Return the regular file of a name below a root; ``BadSampleError`` for others, also behind links."""
    if "\0" in name or not name:
        raise BadSampleError(Reason.OUTSIDE, repr(name[:80]))
    if not root:
        raise BadSampleError(Reason.OUTSIDE, f"{name}: source.root says where its files are")
    base = os.path.realpath(root)
    # A name may be absolute if it lies below the root.
    tops = (base.rstrip(os.sep) + os.sep, os.path.abspath(root).rstrip(os.sep) + os.sep)  # noqa: PTH100
    below = next((name.removeprefix(top) for top in tops if name.startswith(top)), name)
    if leaves_root(below):
        hint = f" (source.root={root}; source.root=/ allows all)" if name.startswith("/") else ""
        raise BadSampleError(Reason.OUTSIDE, name + hint)
    try:
        path = Path(base, below).resolve(strict=True)
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
