"""Shape traces: a Parquet file with one row per sample (columns: ``columns.py``, ``docs/workloads.md``)."""

import hashlib
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import numpy as np

from entrain_bench.base.arrays import IntArray, offsets_from_counts, rows_of, sum_rows
from entrain_bench.base.errors import UserError, either, require, similar
from entrain_bench.specs.parse import Allowed, OneOf, between
from entrain_bench.specs.shapes import Items, SampleShapes, shapes_of
from entrain_bench.specs.tokens import MAX_TOKENS, TokenRules
from entrain_bench.specs.workload import ListedShapes, stable_rng

from .columns import ALL, MAX_PIXELS, Take, TraceColumns, read_columns
from .marginals import parse_marginal
from .synthetic import Distribution, Name, drawn_sizes
from .tokens import MAX_ASPECT_RATIO, audio_items, image_items, text_tokens, video_items


class OnOverlong(StrEnum):
    """Treatment of samples that are longer than the model's context."""

    ERROR = "error"
    TRUNCATE = "truncate"
    DROP = "drop"


def fitting(source: ListedShapes, context_tokens: int, on_overlong: OnOverlong) -> ListedShapes:
    """Return a source of samples of at most ``context_tokens`` LLM tokens, with counts of shortened and dropped ones.

    A sample of which truncation leaves nothing is dropped; a source without longer ones is returned itself.
    """
    longer = source.shapes.llm_tokens > context_tokens
    if not np.any(longer):
        return source
    if on_overlong is OnOverlong.DROP:
        fit = np.flatnonzero(~longer)
        shapes = source.shapes.take(fit)
        return replace(source, shapes=shapes, num_dropped=int(longer.sum()), rows=_rows_at(source, fit))
    kept = truncated(source.shapes, context_tokens)
    num_dropped = len(source.shapes) - len(kept)
    left = np.flatnonzero(np.isin(source.shapes.sample_ids, kept.sample_ids)) if num_dropped else None
    rows = source.rows if left is None else _rows_at(source, left)
    shortened = int(longer.sum()) - num_dropped
    return replace(source, shapes=kept, num_truncated=shortened, num_dropped=num_dropped, rows=rows)


def _rows_at(source: ListedShapes, left: IntArray) -> IntArray:
    """Rows of the samples that are left of a source."""
    return left if source.rows is None else source.rows[left]


def truncated(shapes: SampleShapes, context_tokens: int) -> SampleShapes:
    """The samples with at most ``context_tokens`` LLM tokens each: text goes first, items go whole, from the last.

    A sample keeps as many of its first items as fit, then as much text as fits. Empty samples are dropped.
    """
    offsets = shapes.item_offsets
    tokens = shapes.item_llm_tokens
    owners = rows_of(offsets)
    before = offsets_from_counts(tokens)
    kept = before[1:] - before[offsets[owners]] <= context_tokens
    counts = np.bincount(owners[kept], minlength=len(shapes))
    room = context_tokens - sum_rows(offsets, np.where(kept, tokens, 0)).astype(np.int64)
    text = np.minimum(shapes.text_tokens, room)
    left = np.flatnonzero((counts > 0) | (text > 0))
    shorter = {
        "text_tokens": text[left],
        "item_offsets": offsets_from_counts(counts[left]),
        **{name: getattr(shapes, name)[kept] for name in ("item_modality", "item_encoder_tokens", "item_llm_tokens")},
        "item_grids": None if shapes.item_grids is None else shapes.item_grids[kept],
        "sample_ids": shapes.sample_ids[left],
        "sample_names": None if shapes.sample_names is None else shapes.sample_names[left],
    }
    return replace(shapes, **shorter)


def _of_samples(counts: IntArray, items: Items) -> Items:
    """Items of sounds or videos, as those of samples that have ``counts`` of these ``[samples]``."""
    owners = rows_of(offsets_from_counts(counts))
    together = np.bincount(owners, weights=items.counts, minlength=len(counts))
    return replace(items, counts=together.astype(np.int64))


def _is_frame_size(size: tuple[int, ...]) -> bool:
    return len(size) == 2 and min(size) >= 1 and max(size) <= min(MAX_PIXELS, MAX_ASPECT_RATIO * min(size))


PACKAGED_TRACES = Path(__file__).parent / "traces"
_FRAME_SIZES = f"[width, height] in pixels, within a ratio of {MAX_ASPECT_RATIO:g}, such as [640,360]"
MAX_IMAGE_TOKENS = 16384
MIN_FRAME_TOKENS = 128
MAX_FRAME_TOKENS = 768
_Tokens = Annotated[int, between(1, MAX_TOKENS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceWorkload:
    """Samples with the sizes that a file lists; docs/workloads.md explains the keys.

    A ``path`` that names a packaged trace is that; ``./x.parquet`` is one in the working directory. Limits are in LLM
    tokens; those of frames are Qwen2.5-VL's. ``text`` draws other texts (``marginals``), once for all rows.
    """

    name: str = ""
    path: Name
    max_image_tokens: _Tokens = MAX_IMAGE_TOKENS
    min_video_frame_tokens: _Tokens = MIN_FRAME_TOKENS
    max_video_frame_tokens: _Tokens = MAX_FRAME_TOKENS
    on_overlong: Annotated[str, OneOf([*OnOverlong])] = OnOverlong.ERROR
    take: Take = ALL
    frame_size: Annotated[tuple[int, ...], Allowed(_is_frame_size, _FRAME_SIZES)] | None = None
    text: Distribution | None = None

    def __post_init__(self) -> None:
        allowed = f"at least min_video_frame_tokens={self.min_video_frame_tokens}"
        ordered = self.max_video_frame_tokens >= self.min_video_frame_tokens
        require(ordered, "workload.max_video_frame_tokens", self.max_video_frame_tokens, allowed)
        if self.text is not None:
            parse_marginal(self.text, "workload.text")
        if not self.name:
            object.__setattr__(self, "name", Path(self.path).stem)

    def fingerprint(self) -> str:
        """SHA-256 of the file's bytes; ``UserError`` for a missing or unreadable file."""
        path = self._file()
        try:
            with path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise UserError(f"workload.path={path}: cannot be read ({error.strerror})") from error

    def source(self, rules: TokenRules) -> ListedShapes:
        """Read the trace and convert all of it once.

        ``UserError`` for an unreadable file or invalid values (file, row and column are named). Also for a token limit
        below the model's minimum, and for rows that are longer than the model's context.
        """
        allowed = f"at least model.tokens.min_image_tokens={rules.min_image_tokens:g}"
        valid = self.max_image_tokens >= rules.min_image_tokens
        require(valid, "workload.max_image_tokens", self.max_image_tokens, allowed)
        free = self.max_image_tokens == MAX_IMAGE_TOKENS or not (rules.images or rules.tiles)
        own = f"{MAX_IMAGE_TOKENS}: the model has its own rules (model.tokens.images or tiles, such as max_tiles)"
        require(free, "workload.max_image_tokens", self.max_image_tokens, own)
        frames = self.min_video_frame_tokens, self.max_video_frame_tokens
        usual = frames == (MIN_FRAME_TOKENS, MAX_FRAME_TOKENS) or rules.video is None
        own = f"{MIN_FRAME_TOKENS} and {MAX_FRAME_TOKENS}: the model has its own rules (model.tokens.video)"
        require(usual, "workload.min_video_frame_tokens and max_video_frame_tokens", frames, own)
        columns = self._columns()
        listed = ListedShapes(self.name, self._shapes(columns, rules), rows=columns.dataset_rows)
        if rules.context_tokens is None:
            return listed
        if self.on_overlong == OnOverlong.ERROR:
            self._refuse_overlong(listed.shapes, rules.context_tokens)
        fitted = fitting(listed, rules.context_tokens, OnOverlong(self.on_overlong))
        if not len(fitted.shapes):
            raise UserError(
                f"workload.path={self.path}: no row is left that fits the model's {rules.context_tokens} tokens"
            )
        return fitted

    def _columns(self) -> TraceColumns:
        frame = None if self.frame_size is None else (float(self.frame_size[0]), float(self.frame_size[1]))
        return read_columns(self._file(), self.take, frame)

    def _refuse_overlong(self, shapes: SampleShapes, context_tokens: int) -> None:
        longer = np.flatnonzero(shapes.llm_tokens > context_tokens)
        if longer.size:
            row = longer[0]
            many = f"{longer.size} of {len(shapes)} rows are longer"
            raise UserError(
                f"workload.path={self.path}: row {row + 1} (sample {shapes.name_of(row)}) has {shapes.llm_tokens[row]} "
                f"LLM tokens, but the model takes at most {context_tokens}; {many}. "
                "Set workload.on_overlong=truncate or drop"
            )

    def _shapes(self, columns: TraceColumns, rules: TokenRules) -> SampleShapes:
        sides = columns.image_widths, columns.image_heights
        frame_sides = columns.frame_widths, columns.frame_heights
        frame_tokens = self.min_video_frame_tokens, self.max_video_frame_tokens
        items = {
            "image": image_items(columns.num_images, *sides, rules, self.max_image_tokens),
            "video": _of_samples(
                columns.num_videos, video_items(columns.video_seconds, *frame_sides, rules, *frame_tokens)
            ),
            "audio": _of_samples(columns.num_sounds, audio_items(columns.audio_seconds, rules)),
        }
        return shapes_of(self._text(columns, rules), items, columns.sample_ids)

    def _text(self, columns: TraceColumns, rules: TokenRules) -> IntArray:
        """Text tokens of every row ``[rows]``."""
        if self.text is not None:
            uniform = stable_rng(f"text of {self.name}").random(len(columns.text))
            return drawn_sizes(parse_marginal(self.text, "workload.text"), uniform, 1, "workload.text")
        return (
            columns.text.astype(np.int64) if columns.text_in_tokens else text_tokens(columns.text, rules, columns.cjk)
        )

    def _file(self) -> Path:
        packaged = PACKAGED_TRACES / self.path
        if self.path == packaged.name and packaged.is_file():
            return packaged
        path = Path(self.path).expanduser()
        if not path.is_file():
            names = sorted(file.name for file in PACKAGED_TRACES.glob("*.parquet"))
            near = similar(self.path, names)
            meant = f" (did you mean {either(near)}?)" if near else ""
            what = "is not a file" if path.exists() else "does not exist"
            raise UserError(
                f"workload.path={self.path}: {what}{meant}. Must be a Parquet file, as entrain-bench trace writes"
            )
        return path
