"""Names that data sets commonly give their fields; docs/workloads.md shows the same table."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from entrain_bench.base.errors import UserError

from .fields import FieldSource
from .interface import Source

# In place of a field's name: the first of these that the data has.
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
# Of what a field of these names holds, the endings of its values tell.
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


def recognised(source: Source) -> Source:
    """The source with names of its data's fields in place of ``auto``.

    Raises:
        UserError: if no field has a known name, or rows name media of a kind of which nothing would be read.
    """
    if not isinstance(source, FieldSource) or AUTO not in source.fields().names:
        return source
    names, rows = source.head()
    chosen: dict[str, Any] = {kind: getattr(source, kind) for kind in (*MEDIA, "seconds")}
    for kind in MEDIA:
        if chosen[kind] == AUTO:
            chosen[kind] = next((name for name in MEDIA[kind] if name in names and _may_hold(kind, name, rows)), None)
        elif chosen[kind] is None:
            continue
        _check_read(kind, chosen[kind], rows)
    if chosen["seconds"] == AUTO:
        chosen["seconds"] = next((name for name in SECONDS if name in names), None)
        # A path of any ending that has a length beside it is a sound's.
        if chosen["seconds"] and source.audio == AUTO and not (chosen["audio"] or chosen["video"]):
            chosen["audio"] = next((name for name in PATHS if name in names), None)
    chosen["text"] = source.text
    if AUTO in (source.text, *source.text):
        chosen["text"] = next((found for group in TEXTS if (found := [name for name in group if name in names])), [])
    if not any(chosen.values()):
        raise UserError(
            f"source.path={source.path}: no field has a known name; fields: {', '.join(names) or 'none'}. "
            "Set source.text, source.images, source.audio or source.video"
        )
    if source.SPARSE:
        # Later records may have what the first have not.
        chosen |= {kind: MEDIA[kind][0] for kind in MEDIA if getattr(source, kind) == AUTO and not chosen[kind]}
    return replace(source, **chosen)


def _may_hold(kind: str, name: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    return name not in PATHS or any(_kind_of(_file_name(row.get(name))) == kind for row in rows)


def _check_read(kind: str, chosen: str | None, rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``UserError`` if values look like names of files of a kind, and no row has the field that is read."""
    if any(row.get(chosen or "") not in (None, "", []) for row in rows):
        return
    for field, value in (pair for row in rows for pair in row.items()):
        name = _file_name(value)
        if _kind_of(name) == kind and not any(map(str.isspace, name)):
            raise UserError(
                f"source.{kind}={chosen or AUTO}: finds no {kind}, but the field {field} names some ({name[:60]}). "
                f"Set source.{kind}={field}, or null to leave them out"
            )


def _file_name(value: Any) -> str:
    """The file name in a value: itself, the first of a list, or its ``path``; empty if there is none."""
    value = value[0] if isinstance(value, list) and value else value
    name = value.get("path") if isinstance(value, Mapping) else value
    return name if isinstance(name, str) and "." in name else ""


def _kind_of(name: str) -> str | None:
    ending = name.rpartition(".")[2].lower()
    return next((kind for kind, known in ENDINGS.items() if ending in known), None)
