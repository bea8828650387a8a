"""The columns of a shape trace: which values they may have, how many rows are taken, and their reader."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from entrain_bench.base.arrays import BoolArray, FloatArray, IntArray, TextArray, offsets_from_counts, rows_of
from entrain_bench.base.errors import UserError
from entrain_bench.specs.parse import Allowed

from .budget import BUDGET
from .tokens import MAX_ASPECT_RATIO

# Bounds that no real sample reaches; they catch milliseconds given as seconds and corrupt files.
MAX_SECONDS = 86_400.0
MAX_PIXELS = 1e6
MAX_TEXT = float(2**31 - 1)


@dataclass(frozen=True, slots=True)
class TraceColumn:
    """The values of a column: whole numbers from ``low`` to ``high``, or any above 0 up to ``high``; 0: no bounds."""

    high: float = 0.0
    whole: bool = True
    low: int = 0

    @property
    def allowed(self) -> str:
        """The allowed values in words; empty without bounds."""
        if not self.high:
            return ""
        if self.whole:
            return f"a whole number from {self.low} to {self.high:.0f}"
        return f"a number above 0, at most {self.high:g}"

    def holds(self, values: FloatArray) -> BoolArray:
        """Whether values are allowed, element by element; NaN is not."""
        valid: BoolArray = values <= self.high
        if self.whole:
            valid &= (values == np.floor(values)) & (values >= self.low)
        else:
            valid &= values > 0
        return valid


COLUMNS: Mapping[str, TraceColumn] = {
    "sample_id": TraceColumn(),
    "text_tokens": TraceColumn(MAX_TEXT),
    "text_chars": TraceColumn(MAX_TEXT),
    "text_cjk": TraceColumn(MAX_TEXT),
    "image_widths": TraceColumn(MAX_PIXELS, low=1),
    "image_heights": TraceColumn(MAX_PIXELS, low=1),
    "n_images": TraceColumn(MAX_TEXT),
    "audio_seconds": TraceColumn(MAX_SECONDS, whole=False),
    "video_seconds": TraceColumn(MAX_SECONDS, whole=False),
    "dataset_row": TraceColumn(MAX_TEXT),
    "text_words": TraceColumn(),
}


ALL = "all"
_FIRST = re.compile(r"first:(?:(\d+)|(\d+(?:\.\d+)?)%)")


def _is_take(text: str) -> bool:
    match = _FIRST.fullmatch(text)
    return text == ALL or (match is not None and 0 < float(match[1] or match[2]) <= (2**53 if match[1] else 100))


# The first of something: all, a number, or a share.
Take = Annotated[str, Allowed(_is_take, "all, first:3000 or first:10%")]


def num_taken(take: Take, total: int) -> int:
    """Return how many of ``total`` to take: a share is rounded, and at least 1 if there are any."""
    match = _FIRST.fullmatch(take)
    if match is None:
        return total
    return min(total, int(match[1]) if match[1] else max(1, round(float(match[2]) / 100 * total)))


# Bytes of a value while it is read; then of a row, of its name, and of an entry of a list, up to the shapes of samples.
_VALUE_BYTES = 24
_ROW_BYTES = 128
_NAME_BYTES = 200
_ENTRY_BYTES = 120
FRAME_HINT = "; workload.frame_size=[640,360] is that of frames which have none"


@dataclass(frozen=True, slots=True)
class TraceColumns:
    """Checked columns of a trace, by sample, image, sound and video; sides in pixels.

    ``sample_ids`` are integers or strings; ``text`` is in tokens or in characters (``text_in_tokens``).
    """

    sample_ids: IntArray | TextArray
    text: FloatArray
    text_in_tokens: bool
    num_images: IntArray
    image_widths: FloatArray
    image_heights: FloatArray
    num_sounds: IntArray
    audio_seconds: FloatArray
    num_videos: IntArray
    video_seconds: FloatArray
    frame_widths: FloatArray
    frame_heights: FloatArray
    # Characters of Chinese, Japanese and Korean among those of the text.
    cjk: FloatArray | None = None
    # Places of the rows in the data set, -1 if unknown; None: those in the trace.
    dataset_rows: IntArray | None = None


def read_columns(path: Path, take: Take = ALL, frame_size: tuple[float, float] | None = None) -> TraceColumns:
    """Read a trace; without ``frame_size`` (width, height) every video must state the size of its frames.

    ``text_tokens`` or else ``text_chars`` is required; an absent or all-null column means that no sample has that
    modality. ``image_widths`` and ``image_heights`` list a row's images, then the size of each of its videos' frames.

    ``UserError`` for a missing, empty or invalid file, missing or misspelt columns, and values outside their range.
    """
    trace = _Trace(path, take)
    text_name = "text_tokens" if trace.has("text_tokens") else "text_chars"
    if not trace.has(text_name):
        raise trace.error("needs a column text_tokens or text_chars; it is missing or all null")
    text = trace.numbers(text_name)
    num_sounds, audio = trace.seconds("audio_seconds")
    num_videos, video = trace.seconds("video_seconds")
    offsets, widths, heights = trace.sizes(num_videos, frame_size)
    counts = np.diff(offsets)
    num_images = counts - num_videos
    trace.check(num_images >= 0, "image_widths", counts, "the size of the frames of the row's video" + FRAME_HINT)
    declared = trace.numbers("n_images", absent=np.nan)
    allowed = "the number of images in image_widths (a video's frame size not counted)"
    trace.check(np.isnan(declared) | (declared == num_images), "n_images", declared, allowed)
    empty = (text == 0) & (counts == 0) & (num_sounds == 0)
    trace.check(~empty, text_name, text, "positive in a row without images, audio and video")

    is_frame = _are_frames(offsets, num_videos)
    names = trace.identities("sample_id") if trace.has("sample_id") else np.arange(trace.num_rows)
    cjk = trace.numbers("text_cjk") if text_name == "text_chars" and trace.has("text_cjk") else None
    if cjk is not None:
        trace.check(cjk <= text, "text_cjk", cjk, "at most text_chars")
    images = widths[~is_frame], heights[~is_frame]
    frames = widths[is_frame], heights[is_frame]
    timed = num_sounds, audio, num_videos, video
    places = trace.numbers("dataset_row", absent=-1.0).astype(np.int64) if "dataset_row" in trace.names else None
    return TraceColumns(names, text, text_name == "text_tokens", num_images, *images, *timed, *frames, cjk, places)


def _read(path: Path, take: Take) -> tuple[list[str], pa.Table]:
    """The names of all columns, and the known columns of the first rows."""
    try:
        with pq.ParquetFile(path) as file:
            names: list[str] = file.schema_arrow.names
            rows = num_taken(take, file.metadata.num_rows)
            groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
            starts = accumulate((group.num_rows for group in groups), initial=0)
            groups = [group for group, start in zip(groups, starts, strict=False) if start < rows]
            chunks = [group.column(index) for group in groups for index in range(group.num_columns)]
            values = sum(chunk.num_values for chunk in chunks if chunk.path_in_schema.partition(".")[0] in COLUMNS)
            BUDGET.ask(_VALUE_BYTES * values, f"workload.path={path}: {values:,} values", UserError)
            # Files may state fewer values than they have.
            with BUDGET.held():
                columns = [name for name in COLUMNS if name in names]
                table = file.read_row_groups([*range(len(groups))], columns=columns).slice(0, rows)
                # Reading takes texts that are no UTF-8; of names it does not, with Python's own error.
                table.validate(full=True)
            return names, table
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"workload.path={path}: is not a readable Parquet file ({reason})") from error


class _Trace:
    """Typed access to the columns of a trace, and errors that say where."""

    def __init__(self, path: Path, take: Take) -> None:
        self._path = path
        self.names, table = _read(path, take)
        names = self.names
        self.num_rows = len(table)
        for name in names:
            if name in COLUMNS and names.count(name) > 1:
                raise self.error(f"column {name}: appears {names.count(name)} times; must be unique")
            near = get_close_matches(name, COLUMNS.keys() - names, n=1, cutoff=0.85)
            if name not in COLUMNS and near:
                raise self.error(f"column {name}: unknown (did you mean {near[0]}?); columns: {', '.join(COLUMNS)}")
        if not self.num_rows:
            raise self.error("has no rows; must have at least 1")
        columns = {name: table.column(name).combine_chunks() for name in table.column_names}
        # An all-null column says the same as an absent one.
        self._columns = {name: column for name, column in columns.items() if column.null_count < len(column)}
        entries = sum(len(column.flatten()) for column in columns.values() if pa.types.is_nested(column.type))
        needed = self.num_rows * (_ROW_BYTES + _NAME_BYTES * self.has("sample_id")) + entries * _ENTRY_BYTES
        what = f"{self.num_rows:,} rows with {entries:,} list entries (workload.take=first:1000 reads fewer)"
        BUDGET.ask(needed, what, self.error)

    def error(self, message: str) -> UserError:
        """An error of this file."""
        return UserError(f"workload.path={self._path}: {message}")

    def check(self, valid: BoolArray, name: str, values: Any, allowed: str, rows: IntArray | None = None) -> None:
        """Raise ``UserError`` for the first value that is not valid; ``rows`` of values, if not one of each row."""
        if not np.all(valid):
            place = int(np.argmin(valid))
            row = place if rows is None else rows[place]
            raise self.error(f"row {row + 1}, column {name}: {np.asarray(values)[place]}; must be {allowed}")

    def has(self, name: str) -> bool:
        """Whether the trace has that column with at least one value."""
        return name in self._columns

    def identities(self, name: str) -> IntArray | TextArray:
        """A column of integers or strings, none of them twice ``[samples]``."""
        column = self._columns[name]
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        kind = column.type
        is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
        if not is_text and not pa.types.is_integer(kind):
            raise self.error(f"column {name}: has type {kind}; must be integers or strings")
        self.check(~_nulls(column), name, np.full(self.num_rows, "null"), "an integer or a string")
        values = column.to_numpy(zero_copy_only=False)
        if not is_text:
            self.check(values <= np.iinfo(np.int64).max, name, values, "at most 2^63 - 1")
            values = values.astype(np.int64)
        _, first, group = np.unique(values, return_index=True, return_inverse=True)
        once = first[group] == np.arange(self.num_rows)
        self.check(once, name, values, f"unique, but row {first[group][np.argmin(once)] + 1} has it as well")
        return np.asarray(values)

    def numbers(self, name: str, absent: float | None = None) -> FloatArray:
        """A numeric column ``[samples]`` within its bounds; ``absent`` (None: an error) where it is null or missing."""
        if absent is not None and not self.has(name):
            return np.full(self.num_rows, absent)
        values = self._floats(name, self._columns[name])
        nulls = _nulls(self._columns[name]) & (absent is not None)
        allowed = COLUMNS[name].allowed + (" or null" if absent is not None else "")
        self.check(COLUMNS[name].holds(values) | nulls, name, values, allowed)
        return values if absent is None else np.where(nulls, absent, values)

    def seconds(self, name: str) -> tuple[IntArray, FloatArray]:
        """Numbers of sounds or videos ``[samples]`` and their lengths; a row has one number, a list, or null."""
        if self.has(name) and pa.types.is_nested(self._columns[name].type):
            offsets, values = self._lists(name)
            self.check(COLUMNS[name].holds(values), name, values, COLUMNS[name].allowed, rows_of(offsets))
            return np.diff(offsets), values
        values = self.numbers(name, absent=np.nan)
        present = ~np.isnan(values)
        return present.astype(np.int64), values[present]

    def sizes(
        self, num_videos: IntArray, frame_size: tuple[float, float] | None
    ) -> tuple[IntArray, FloatArray, FloatArray]:
        """The lists of widths and heights: row offsets ``[samples + 1]`` and both sides in pixels ``[entries]``."""
        offsets, widths = self._lists("image_widths")
        height_offsets, heights = self._lists("image_heights")
        height_counts = np.diff(height_offsets)
        self.check(np.diff(offsets) == height_counts, "image_heights", height_counts, "as many entries as image_widths")
        if frame_size is not None:
            missing = np.where(np.diff(offsets) == self.numbers("n_images", absent=0.0), num_videos, 0)
            widths, heights = (np.insert(sides, np.repeat(offsets[1:], missing), 0.0) for sides in (widths, heights))
            offsets = offsets + offsets_from_counts(missing)
            unknown = _are_frames(offsets, num_videos) & ((widths == 0) | (heights == 0))
            widths[unknown], heights[unknown] = frame_size
        owners = rows_of(offsets)
        for name, values in (("image_widths", widths), ("image_heights", heights)):
            allowed = COLUMNS[name].allowed + (FRAME_HINT if np.any(num_videos[owners[values == 0]]) else "")
            self.check(COLUMNS[name].holds(values), name, values, allowed, owners)
        thick = np.maximum(widths, heights) <= MAX_ASPECT_RATIO * np.minimum(widths, heights)
        sides = np.stack([widths, heights], axis=1)
        self.check(thick, "image_widths", sides, f"sides within a ratio of {MAX_ASPECT_RATIO:g}", owners)
        return offsets, widths, heights

    def _lists(self, name: str) -> tuple[IntArray, FloatArray]:
        """Row offsets ``[samples + 1]`` and all entries; lists are empty where the column is missing."""
        if not self.has(name):
            return np.zeros(self.num_rows + 1, np.int64), np.zeros(0)
        column = self._columns[name]
        kind = column.type
        if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
            raise self.error(f"column {name}: has type {kind}; must be lists")
        counts = pc.list_value_length(column).fill_null(0)
        offsets = offsets_from_counts(counts.to_numpy(zero_copy_only=False))
        return offsets, self._floats(name, column.flatten())

    def _floats(self, name: str, column: Any) -> FloatArray:
        kind = column.type
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind)):
            raise self.error(f"column {name}: holds {kind}; must be numbers")
        return np.asarray(column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False))


def _are_frames(offsets: IntArray, num_videos: IntArray) -> BoolArray:
    """A mask of the entries that are sizes of frames: as many of the last of a row as it has videos."""
    owners = rows_of(offsets)
    return np.asarray(offsets[1:][owners] - np.arange(len(owners)) <= num_videos[owners])


def _nulls(column: Any) -> BoolArray:
    return np.asarray(column.is_null().to_numpy(zero_copy_only=False))
