"""Read the samples that a trace lists, by name, from the dataset that was scanned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from entrain_bench.base.arrays import IntArray
from entrain_bench.base.errors import UserError
from entrain_bench.base.remembered import remembered
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.specs.tokens import TileRules, TokenRules
from entrain_bench.specs.workload import Moved, Pixels, Sound

from ..columns import TraceColumns
from .decode import STATED_WITHIN_S, VideoFrames, decoded_image, decoded_sound, image_tiles, resized, tile_of
from .fields import FileSource
from .files import DataFile
from .interface import BadSampleError, Limits, RawSample, Reason, one_line
from .parquet import ParquetSource
from .records import RecordSource
from .scan import Sizes, measure, read_scan
from .tar import TarSource
from .text import BYTES, token_ids, tokenizer_version, vocabulary_of

# By the names that a trace uses; a trace can name no other code to run.
SOURCES: Mapping[str, type[FileSource]] = {kind.__name__: kind for kind in (ParquetSource, RecordSource, TarSource)}


class Kept:
    """The last content that a process has read; empty in other processes."""

    def __init__(self) -> None:
        self.samples: dict[str, tuple[RawSample, Sizes]] = {}
        self.tiles: dict[tuple[str, int], Sequence[Pixels]] = {}
        self.videos: dict[str, VideoFrames] = {}

    def __reduce__(self) -> tuple[type[Kept], tuple[()]]:
        return Kept, ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSamples:
    """Samples of a scanned dataset.

    Attributes:
        source: reads the dataset.
        files: scanned files by label.
        limits: size limits of images, sounds and videos.
        tokenizer: path of the tokenizer, or ``bytes``.
        rules: token rules of the model.
        shapes_of: returns the shapes of samples of given sizes, as the workload does.
        truncates: whether the workload shortens long samples.
        kept: caches.
    """

    source: FileSource
    files: Mapping[str, DataFile]
    limits: Limits
    tokenizer: str
    rules: TokenRules
    shapes_of: Callable[[TraceColumns], SampleShapes]
    truncates: bool
    kept: Kept = field(default_factory=Kept, repr=False, compare=False)

    def picture(self, shapes: SampleShapes, item: int) -> Pixels:
        """Return an image, a tile or the frames of a group, resized to the item's patches."""
        name, number, kind = _place(shapes, item)
        with _named(name):
            if kind == "video":
                return self._frames(shapes, item, number)
            if self.rules.tiles is not None:
                return self._tile(shapes, item, number, self.rules.tiles)
            raw, _ = self._sample(shapes, item)
            return resized(decoded_image(raw.images[number], self.limits), *self._sides(shapes, item))[None]

    def sound(self, shapes: SampleShapes, item: int) -> Sound:
        """Return an audio segment of ``rules.audio_segment_s`` seconds; the last of a sample may be shorter."""
        name, number, _ = _place(shapes, item)
        with _named(name):
            raw, _ = self._sample(shapes, item)
            assert raw.audio is not None
            start_s = number * self.rules.audio_segment_s
            return decoded_sound(raw.audio, self.limits, start_s, start_s + self.rules.audio_segment_s)

    def tokens(self, shapes: SampleShapes, sample: int) -> IntArray:
        """Return the token ids of a sample's text; if the sample was shortened, the first ones."""
        name = shapes.name_of(sample)
        wanted = int(shapes.text_tokens[sample])
        with _named(name):
            found = token_ids(self._read(name, text_only=True).texts, self.tokenizer)
            if len(found) < wanted or (len(found) > wanted and not self.truncates):
                raise BadSampleError(Reason.CHANGED, f"its text has {len(found)} tokens, the trace says {wanted}")
        return found[:wanted]

    def _sample(self, shapes: SampleShapes, item: int) -> tuple[RawSample, Sizes]:
        """Read the sample of an item and check that it equals the trace."""
        sample = int(np.searchsorted(shapes.item_offsets, item, side="right")) - 1
        name = shapes.name_of(sample)

        def read() -> tuple[RawSample, Sizes]:
            raw = self._read(name)
            sizes = measure(raw, self.limits)
            sizes = replace(sizes, audio_seconds=_length(raw, sizes))
            self._check(shapes, sample, self.shapes_of(_columns(sizes)))
            return raw, sizes

        return remembered(self.kept.samples, name, read, 4)

    def _read(self, name: str, *, text_only: bool = False) -> RawSample:
        label, _, number = name.rpartition(":")
        if label not in self.files or not number.isdecimal():
            raise BadSampleError(Reason.MISSING, f"no {name} in the scanned data")
        return self.source.record(self.files[label], int(number), self.limits, text_only=text_only)

    def _check(self, shapes: SampleShapes, sample: int, own: SampleShapes) -> None:
        """Raise ``BadSampleError`` unless the listed items of a sample are the first that were found."""
        first, last = shapes.item_offsets[sample : sample + 2].tolist()
        listed = last - first
        found = own.num_items
        if found < listed or (found > listed and not self.truncates):
            raise BadSampleError(Reason.CHANGED, f"it has {found} items, the trace lists {listed}")
        for place in range(listed):
            now = _size(own, place)
            then = _size(shapes, first + place)
            if now != then:
                raise BadSampleError(Reason.CHANGED, f"its item {place + 1} is {now}, the trace says {then}")

    def _sides(self, shapes: SampleShapes, item: int) -> tuple[int, int]:
        """Return height and width in pixels of an item that is not a tile."""
        assert shapes.item_grids is not None
        rows, columns = shapes.item_grids[item].tolist()
        return rows * self.rules.patch_pixels, columns * self.rules.patch_pixels

    def _tile(self, shapes: SampleShapes, item: int, number: int, rules: TileRules) -> Pixels:
        """Return a tile of an image; all tiles are decoded at once. Patches do not cover the last pixels."""
        raw, sizes = self._sample(shapes, item)
        widths, heights = (np.array(sides[: sizes.num_images]) for sides in (sizes.widths, sizes.heights))
        place, tile = tile_of(number, widths, heights, rules)

        def cut() -> Sequence[Pixels]:
            return image_tiles(decoded_image(raw.images[place], self.limits), len(widths) == 1, rules)

        tiles = remembered(self.kept.tiles, (_place(shapes, item)[0], place), cut, 1)
        return self._covered(tiles[tile][None], rules)

    def _frames(self, shapes: SampleShapes, item: int, group: int) -> Pixels:
        """Return the frames of a group of a video; earlier frames are decoded, later frames are not."""
        raw, sizes = self._sample(shapes, item)
        each = self.rules.temporal_patch_frames
        tiles = self.rules.tiles

        def begin() -> VideoFrames:
            assert raw.video is not None
            # A shortened sample has the first groups of all that the video is cut into.
            own = self.shapes_of(_columns(sizes))
            groups = int(np.count_nonzero(own.item_modality == shapes.item_modality[item]))
            size = (tiles.pixels, tiles.pixels) if tiles else self._sides(shapes, item)
            return VideoFrames(raw.video, self.limits, groups * each, *size)

        video = remembered(self.kept.videos, _place(shapes, item)[0], begin, 2)
        found = video.between(group * each, (group + 1) * each)
        return self._covered(found, tiles) if tiles else found

    def _covered(self, pixels: Pixels, rules: TileRules) -> Pixels:
        """Return the pixels that a tile's patches cover: 27 x 14 of SigLIP's 384 pixels."""
        side = rules.encoder_side * self.rules.patch_pixels
        return pixels[:, :side, :side]


def samples_of(
    trace: Path,
    rules: TokenRules,
    vocab_size: int,
    moved: Moved,
    shapes_of: Callable[[TraceColumns], SampleShapes],
    truncates: bool,
) -> TraceSamples:
    """Return the samples that a trace lists.

    Raises:
        UserError: if the trace was not made by a scan of this version, or without a tokenizer; if the data is missing
            or changed; if the tokenizer has another vocabulary; and for token rules of a published processor.
    """
    for key in ("images", "frames", "audio"):
        if getattr(rules, key) is not None:
            raise UserError(f"model.tokens.{key}: is not supported with harness.data=files; set harness.data=made_up")
    scan = read_scan(trace)
    if scan is None:
        raise UserError(
            f"workload.path={trace}: lists shapes only. harness.data=files needs a trace made by entrain-bench trace"
        )
    try:
        source = _source(trace, scan["source"], moved)
        limits = Limits(**scan["limits"])
        files = dict(scan["files"])
        scanned = scan["tokenizer"]
        version = scan["tokenizer_version"]
    except (KeyError, TypeError) as error:
        raise UserError(
            f"workload.path={trace}: was made by another version of entrain-bench. Run entrain-bench trace again"
        ) from error
    tokenizer = _tokenizer(trace, scanned, version, moved, vocab_size)
    return TraceSamples(
        source=source,
        files=_files(source, files, moved),
        limits=limits,
        tokenizer=tokenizer,
        rules=rules,
        shapes_of=shapes_of,
        truncates=truncates,
    )


def _source(trace: Path, described: Mapping[str, Any], moved: Moved) -> FileSource:
    values = dict(described)
    kind = values.pop("kind")
    if kind not in SOURCES:
        raise UserError(
            f"workload.path={trace}: was scanned from {kind}, whose records cannot be read one by one. "
            "harness.data=files reads local Parquet, WebDataset, JSON and JSONL"
        )
    names = {entry.name for entry in fields(SOURCES[kind])}
    if moved.root is not None and "root" not in names:
        raise UserError(f"harness.data_root={moved.root}: must be null, because {kind} data names no files")
    given = {"path": moved.path, "root": moved.root}
    return SOURCES[kind](**values | {key: value for key, value in given.items() if value is not None})


def _files(source: FileSource, scanned: Mapping[str, str], moved: Moved) -> dict[str, DataFile]:
    """Return the scanned files after checking that they did not change; for moved data only sizes are compared."""
    try:
        found = {file.label: file for file in source.files()}
    except UserError as error:
        missing = "the scanned data was not found"
        raise UserError(f"harness.data_path={moved.path}: {missing} ({error}). Set it to where the data is") from error
    for label, then in scanned.items():
        if label not in found:
            raise UserError(
                f"harness.data_path={moved.path}: the scanned file {label} was not found. Set it to where the data is"
            )
        now = found[label].version
        if moved.path is not None:
            now, then = (version.partition("-")[0] for version in (now, then))
        if now != then:
            path = found[label].path
            raise UserError(
                f"{path}: changed since the scan (bytes and modification time: {now}, in the scan {then}). Run "
                "entrain-bench trace again, or set harness.data_path to a copy (only sizes are compared)"
            )
    return {label: found[label] for label in scanned}


def _tokenizer(trace: Path, scanned: str | None, version: str, moved: Moved, vocab_size: int) -> str:
    if scanned is None:
        raise UserError(
            f"workload.path={trace}: counts characters, not tokens. For harness.data=files, scan with tokenizer=bytes "
            "or tokenizer=FILE/tokenizer.json"
        )
    tokenizer = str(moved.tokenizer or scanned)
    where = f"harness.data_tokenizer={moved.tokenizer}"
    if tokenizer != BYTES and not Path(tokenizer).expanduser().is_file():
        raise UserError(f"{where}: the scan's tokenizer {tokenizer} was not found. Set it to where the file is")
    if tokenizer_version(tokenizer) != version:
        raise UserError(f"{where}: {tokenizer} differs from the scan's tokenizer. To use another, scan again")
    if (ids := vocabulary_of(tokenizer)) > vocab_size:
        raise UserError(
            f"tokenizer={tokenizer}: has ids up to {ids - 1}. They must be below the model's vocab_size={vocab_size}"
        )
    return tokenizer


def _place(shapes: SampleShapes, item: int) -> tuple[str, int, str]:
    """Return the name of an item's sample, the item's index among those of its modality, and the modality."""
    sample = int(np.searchsorted(shapes.item_offsets, item, side="right")) - 1
    before = shapes.item_modality[shapes.item_offsets[sample] : item]
    kind = int(shapes.item_modality[item])
    return shapes.name_of(sample), int(np.count_nonzero(before == kind)), shapes.modalities[kind]


def _size(shapes: SampleShapes, item: int) -> str:
    """Return an item's modality and size in words."""
    tokens = f"{shapes.modalities[int(shapes.item_modality[item])]} of {shapes.item_encoder_tokens[item]} tokens"
    if shapes.item_grids is None or not shapes.item_grids[item, 0]:
        return tokens
    rows, columns = shapes.item_grids[item].tolist()
    return f"{tokens} in {rows} rows of {columns}"


def _length(raw: RawSample, sizes: Sizes) -> float | None:
    """Return a sample's audio seconds: the stated ones if the decoded length is close to them."""
    own = sizes.audio_seconds
    stated = raw.seconds
    if own is None or stated is None:
        return own
    if abs(own - stated) > STATED_WITHIN_S:
        raise BadSampleError(Reason.CHANGED, f"its sound takes {own:g} s, the data states {stated:g}")
    return stated


def _columns(sizes: Sizes) -> TraceColumns:
    """Return a trace's columns for one sample, with one character of text, because it may have no item."""
    images = sizes.num_images
    sides = [np.array(side, np.float64) for side in (sizes.widths, sizes.heights)]
    audio, video = (
        np.array([np.nan if seconds is None else seconds]) for seconds in (sizes.audio_seconds, sizes.video_seconds)
    )
    return TraceColumns(
        sample_ids=np.arange(1),
        text=np.ones(1),
        text_in_tokens=True,
        num_images=np.array([images]),
        image_widths=sides[0][:images],
        image_heights=sides[1][:images],
        audio_seconds=audio,
        video_seconds=video,
        frame_widths=sides[0][images:],
        frame_heights=sides[1][images:],
    )


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Turn any error into one line that names the sample."""
    try:
        yield
    except UserError:
        raise
    except BadSampleError as error:
        raise UserError(f"sample {name}: {error}") from error
    except (OSError, EOFError, ValueError, MemoryError) as error:
        raise UserError(f"sample {name}: cannot be read ({one_line(error)})") from error
