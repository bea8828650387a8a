"""Read the samples that a trace lists, by name, from the dataset that was scanned."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from entrain_bench.base.arrays import IntArray
from entrain_bench.base.errors import UserError
from entrain_bench.specs.parse import check_values
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.specs.tokens import TileRules, TokenRules
from entrain_bench.specs.workload import Moved, Pixels, Sound

from ..budget import BUDGET
from ..columns import TraceColumns
from .fields import RawSample
from .formats import FileSource
from .media import STATED_WITHIN_S, decoded_frames, decoded_image, decoded_sound, image_tiles, resized
from .scan import measure, read_scan
from .source import BadSampleError, Limits, Reason, Shard, one_line, over_budget
from .tokenizers import BYTES, token_ids, tokenizer_version, vocabulary_of

type ShapesOf = Callable[[TraceColumns], SampleShapes]
# A sample: its source, file, number there, and the limits.
type Key = tuple[FileSource, Shard, int, Limits]


@dataclass(frozen=True, slots=True)
class TraceSamples:
    """Samples of a scanned dataset, whose files are found by label."""

    source: FileSource
    files: Mapping[str, Shard]
    limits: Limits
    tokenizer: str
    rules: TokenRules
    # The shapes of samples of given sizes, and whether long samples are shortened, as the workload does.
    shapes_of: ShapesOf
    truncates: bool

    def picture(self, shapes: SampleShapes, item: int) -> Pixels:
        """Return an image, a tile or the frames of a group, resized to the item's patches."""
        sample, number, kind = _place(shapes, item)
        tiles = self.rules.tiles
        with _naming(shapes.name_of(sample)):
            key, raw, now = self._measured(shapes, sample)
            if kind == "video":
                many = self.rules.temporal_patch_frames
                # A shortened sample has the first groups of all that the video is cut into.
                of_video = shapes.item_modality[item]
                listed = shapes.item_modality[slice(*shapes.item_offsets[sample : sample + 2])]
                groups = (int(np.count_nonzero(each == of_video)) for each in (now.item_modality, listed))
                frames = _frames(key, *(many * each for each in groups), self._sides(shapes, item))
                pixels = frames[number * many : (number + 1) * many]
            elif tiles is None:
                return resized(decoded_image(raw.images[number], self.limits), *self._sides(shapes, item))[None]
            else:
                pixels = _tiles(key, now.num_items, tiles)[number][None]
        if tiles is None:
            return pixels
        # The pixels that a tile's patches cover: 27 x 14 of SigLIP's 384.
        side = tiles.encoder_side * self.rules.patch_pixels
        return pixels[:, :side, :side]

    def sound(self, shapes: SampleShapes, item: int) -> Sound:
        """Return an audio segment of ``rules.audio_segment_s`` seconds; the last of a sample may be shorter."""
        sample, number, _ = _place(shapes, item)
        with _naming(shapes.name_of(sample)):
            _, raw, _ = self._measured(shapes, sample)
            start_s = number * self.rules.audio_segment_s
            return decoded_sound(raw.audio[0], self.limits, start_s, start_s + self.rules.audio_segment_s)

    def tokens(self, shapes: SampleShapes, sample: int) -> IntArray:
        """Return the token ids of a sample's text; if the sample was shortened, the first ones."""
        name = shapes.name_of(sample)
        wanted = int(shapes.text_tokens[sample])
        with _naming(name):
            tokens = token_ids(_record(self._key(name)), self.tokenizer)
            if len(tokens) < wanted or (len(tokens) > wanted and not self.truncates):
                raise BadSampleError(Reason.CHANGED, f"its text has {len(tokens)} tokens, the trace says {wanted}")
        return tokens[:wanted]

    def _key(self, name: str) -> Key:
        label, _, number = name.rpartition(":")
        if label not in self.files or not number.isdecimal():
            raise BadSampleError(Reason.MISSING, f"no {name} in the scanned data")
        return self.source, self.files[label], int(number), self.limits

    def _measured(self, shapes: SampleShapes, sample: int) -> tuple[Key, RawSample, SampleShapes]:
        """Read a sample, and its shape now; the listed items must be the first that it has."""
        key = self._key(shapes.name_of(sample))
        raw = _record(key)
        row = measure(raw, self.limits)
        if max(len(raw.audio), len(raw.video)) > 1:
            raise BadSampleError(Reason.RECORD, "several sounds or videos are not supported with harness.data=files")
        if raw.audio and raw.seconds is not None:
            (seconds,) = row["audio_seconds"]
            if abs(seconds - raw.seconds) > STATED_WITHIN_S:
                what = f"its sound takes {seconds:g} s, the data states {raw.seconds:g}"
                raise BadSampleError(Reason.CHANGED, what)
            row["audio_seconds"] = [raw.seconds]
        now = self.shapes_of(_columns(row))
        first, last = shapes.item_offsets[sample : sample + 2].tolist()
        listed = last - first
        if now.num_items < listed or (now.num_items > listed and not self.truncates):
            raise BadSampleError(Reason.CHANGED, f"it has {now.num_items} items, the trace lists {listed}")
        pairs = zip(_items(now, 0, listed), _items(shapes, first, last), strict=True)
        for number, (current, then) in enumerate(pairs, 1):
            if current != then:
                raise BadSampleError(Reason.CHANGED, f"its item {number} is {current}, the trace says {then}")
        return key, raw, now

    def _sides(self, shapes: SampleShapes, item: int) -> tuple[int, int]:
        """Return height and width in pixels of an image or a frame."""
        if self.rules.tiles is not None:
            return self.rules.tiles.pixels, self.rules.tiles.pixels
        assert shapes.item_grids is not None
        rows, columns = shapes.item_grids[item].tolist()
        return rows * self.rules.patch_pixels, columns * self.rules.patch_pixels


# A process keeps the last content that it has read, for a sample's items are asked for one by one.
@lru_cache(maxsize=4)
def _record(key: Key) -> RawSample:
    source, shard, row, limits = key
    return source.record(shard, row, limits)


@lru_cache(maxsize=1)
def _tiles(key: Key, count: int, rules: TileRules) -> Sequence[Pixels]:
    """Return all tiles of a sample's images."""
    BUDGET.ask(3 * count * rules.pixels**2, f"{count} tiles", over_budget)
    raw = _record(key)
    images = (decoded_image(image, key[-1]) for image in raw.images)
    tiles = [tile for image in images for tile in image_tiles(image, len(raw.images) == 1, rules)]
    if len(tiles) > count:
        raise BadSampleError(Reason.CHANGED, f"it has {len(tiles)} tiles, by its sizes {count}")
    return tiles


@lru_cache(maxsize=2)
def _frames(key: Key, count: int, most: int, size: tuple[int, int]) -> Pixels:
    """Return the first frames of a sample's video."""
    return decoded_frames(_record(key).video[0], key[-1], count, most, size)


def samples_of(
    trace: Path, rules: TokenRules, vocab_size: int, moved: Moved, shapes_of: ShapesOf, truncates: bool
) -> TraceSamples:
    """Return the samples that a trace lists.

    ``UserError`` if the trace was not made by a scan of this version, or without a tokenizer. Also if the data is
    missing or changed, if the tokenizer has another vocabulary, and for token rules of a published processor.
    """
    for key in ("images", "frames", "audio"):
        if getattr(rules, key) is not None:
            raise UserError(f"model.tokens.{key}: is not supported with harness.data=files; set harness.data=made_up")
    where = f"workload.path={trace}"
    scan = read_scan(trace)
    if scan is None:
        raise UserError(f"{where}: lists shapes only. harness.data=files needs a trace made by entrain-bench trace")
    try:
        values = dict(scan["source"])
        kind = values.pop("kind")
        # A trace can name no other code to run.
        if kind != FileSource.__name__:
            raise UserError(
                f"{where}: was scanned from {kind}, whose records cannot be read one by one. "
                "harness.data=files reads local files"
            )
        elsewhere = {key: value for key, value in (("path", moved.path), ("root", moved.root)) if value is not None}
        source = FileSource(**values | elsewhere)
        limits = Limits(**scan["limits"])
        check_values(Limits, scan["limits"], f"{where}: limits")
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
    return TraceSamples(source, _files(source, versions, moved), limits, tokenizer, rules, shapes_of, truncates)


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


def _place(shapes: SampleShapes, item: int) -> tuple[int, int, str]:
    """Return an item's sample, the item's index among those of its modality, and the modality."""
    sample = int(np.searchsorted(shapes.item_offsets, item, side="right")) - 1
    before = shapes.item_modality[shapes.item_offsets[sample] : item]
    kind = int(shapes.item_modality[item])
    return sample, int(np.count_nonzero(before == kind)), shapes.modalities[kind]


def _items(shapes: SampleShapes, first: int, last: int) -> list[str]:
    """Return modality and size of some items in words."""
    return [
        f"{shapes.modalities[int(shapes.item_modality[item])]} of {shapes.item_encoder_tokens[item]} tokens"
        + ("" if shapes.item_grids is None else " in {} rows of {}".format(*shapes.item_grids[item]))
        for item in range(first, last)
    ]


def _columns(row: Mapping[str, Any]) -> TraceColumns:
    """Return a trace's columns for one sample, with one character of text, because it may have no item."""
    images = row["n_images"]
    names = ("image_widths", "image_heights", "audio_seconds", "video_seconds")
    widths, heights, audio, video = (np.array(row[name], np.float64) for name in names)
    frames = widths[images:], heights[images:]
    timed = np.array([len(audio)]), audio, np.array([len(video)]), video
    sides = widths[:images], heights[:images]
    return TraceColumns(np.arange(1), np.ones(1), True, np.array([images]), *sides, *timed, *frames)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Turn any error into one line that names the sample."""
    try:
        yield
    except UserError:
        raise
    except BadSampleError as error:
        raise UserError(f"sample {name}: {error}") from error
    except (OSError, EOFError, ValueError, MemoryError) as error:
        raise UserError(f"sample {name}: cannot be read ({one_line(error)})") from error
