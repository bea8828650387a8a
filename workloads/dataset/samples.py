"""Read the samples that a trace lists, by name, from the dataset that was scanned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
from .formats import FileSource, ParquetSource, RecordSource, TarSource
from .media import STATED_WITHIN_S, VideoFrames, decoded_image, decoded_sound, image_tiles, resized, tile_of
from .scan import BYTES, Sizes, measure, read_scan, token_ids, tokenizer_version, vocabulary_of
from .source import BadSampleError, Limits, RawSample, Reason, Shard, one_line

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
    files: Mapping[str, Shard]
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
            tokens = token_ids(self._read(name, text_only=True).texts, self.tokenizer)
            if len(tokens) < wanted or (len(tokens) > wanted and not self.truncates):
                raise BadSampleError(Reason.CHANGED, f"its text has {len(tokens)} tokens, the trace says {wanted}")
        return tokens[:wanted]

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

    def _check(self, shapes: SampleShapes, sample: int, now: SampleShapes) -> None:
        """Raise ``BadSampleError`` unless the listed items of a sample are the first that it has now."""
        first, last = shapes.item_offsets[sample : sample + 2].tolist()
        listed = last - first
        if now.num_items < listed or (now.num_items > listed and not self.truncates):
            raise BadSampleError(Reason.CHANGED, f"it has {now.num_items} items, the trace lists {listed}")
        for place in range(listed):
            sizes = [_size(now, place), _size(shapes, first + place)]
            if sizes[0] != sizes[1]:
                raise BadSampleError(Reason.CHANGED, f"its item {place + 1} is {sizes[0]}, the trace says {sizes[1]}")

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
        many = self.rules.temporal_patch_frames
        tiles = self.rules.tiles

        def begin() -> VideoFrames:
            assert raw.video is not None
            # A shortened sample has the first groups of all that the video is cut into.
            whole = self.shapes_of(_columns(sizes))
            groups = int(np.count_nonzero(whole.item_modality == shapes.item_modality[item]))
            size = (tiles.pixels, tiles.pixels) if tiles else self._sides(shapes, item)
            return VideoFrames(raw.video, self.limits, groups * many, *size)

        video = remembered(self.kept.videos, _place(shapes, item)[0], begin, 2)
        frames = video.between(group * many, (group + 1) * many)
        return self._covered(frames, tiles) if tiles else frames

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
    where = f"workload.path={trace}"
    scan = read_scan(trace)
    if scan is None:
        raise UserError(f"{where}: lists shapes only. harness.data=files needs a trace made by entrain-bench trace")
    try:
        source = _source(where, dict(scan["source"]), moved)
        limits = Limits(**scan["limits"])
        versions = dict(scan["files"])
        tokenizer = scan["tokenizer"]
        tokenizer_hash = scan["tokenizer_version"]
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{where}: was made by another version of entrain-bench. Run entrain-bench trace again"
        ) from error
    if tokenizer is None:
        raise UserError(
            f"{where}: counts characters, not tokens. For harness.data=files, scan with tokenizer=bytes "
            "or tokenizer=FILE/tokenizer.json"
        )
    tokenizer = str(moved.tokenizer or tokenizer)
    _check_tokenizer(tokenizer, tokenizer_hash, f"harness.data_tokenizer={moved.tokenizer}", vocab_size)
    return TraceSamples(
        source=source,
        files=_files(source, versions, moved),
        limits=limits,
        tokenizer=tokenizer,
        rules=rules,
        shapes_of=shapes_of,
        truncates=truncates,
    )


def _source(where: str, values: dict[str, Any], moved: Moved) -> FileSource:
    kind = values.pop("kind")
    if kind not in SOURCES:
        raise UserError(
            f"{where}: was scanned from {kind}, whose records cannot be read one by one. "
            "harness.data=files reads local Parquet, WebDataset, JSON and JSONL"
        )
    if moved.root is not None and "root" not in values:
        raise UserError(f"harness.data_root={moved.root}: must be null, because {kind} data names no files")
    given = {"path": moved.path, "root": moved.root}
    return SOURCES[kind](**values | {key: value for key, value in given.items() if value is not None})


def _files(source: FileSource, scanned: Mapping[str, str], moved: Moved) -> dict[str, Shard]:
    """Return the scanned files after checking that they did not change; for moved data only sizes are compared."""
    where = f"harness.data_path={moved.path}"
    try:
        files = {file.label: file for file in source.files()}
    except UserError as error:
        raise UserError(f"{where}: the scanned data was not found ({error}). Set it to where the data is") from error
    for label, then in scanned.items():
        if label not in files:
            raise UserError(f"{where}: the scanned file {label} was not found. Set it to where the data is")
        now = files[label].version
        if moved.path is not None:
            now, then = (version.partition("-")[0] for version in (now, then))
        if now != then:
            raise UserError(
                f"{files[label].place}: changed since the scan (bytes and time: {now}, in the scan {then}). "
                "Run entrain-bench trace again, or set harness.data_path to a copy (only sizes are compared)"
            )
    return {label: files[label] for label in scanned}


def _check_tokenizer(tokenizer: str, version: str, where: str, vocab_size: int) -> None:
    if tokenizer != BYTES and not Path(tokenizer).expanduser().is_file():
        raise UserError(f"{where}: the scan's tokenizer {tokenizer} was not found. Set it to where the file is")
    if tokenizer_version(tokenizer) != version:
        raise UserError(f"{where}: {tokenizer} differs from the scan's tokenizer. To use another, scan again")
    if (ids := vocabulary_of(tokenizer)) > vocab_size:
        raise UserError(
            f"tokenizer={tokenizer}: has ids up to {ids - 1}. They must be below the model's vocab_size={vocab_size}"
        )


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
    decoded = sizes.audio_seconds
    stated = raw.seconds
    if decoded is None or stated is None:
        return decoded
    if abs(decoded - stated) > STATED_WITHIN_S:
        raise BadSampleError(Reason.CHANGED, f"its sound takes {decoded:g} s, the data states {stated:g}")
    return stated


def _columns(sizes: Sizes) -> TraceColumns:
    """Return a trace's columns for one sample, with one character of text, because it may have no item."""
    images = sizes.num_images
    widths, heights = (np.array(sides, np.float64) for sides in (sizes.widths, sizes.heights))
    return TraceColumns(
        sample_ids=np.arange(1),
        text=np.ones(1),
        text_in_tokens=True,
        num_images=np.array([images]),
        image_widths=widths[:images],
        image_heights=heights[:images],
        audio_seconds=np.array([sizes.audio_seconds], np.float64),
        video_seconds=np.array([sizes.video_seconds], np.float64),
        frame_widths=widths[images:],
        frame_heights=heights[images:],
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
