"""Samples longer than a model's context: refused, shortened, or left out."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

import numpy as np

from entrain_bench.base.arrays import offsets_from_counts, rows_of, sum_rows
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.specs.workload import ListedShapes


class OnOverlong(StrEnum):
    """Treatment of samples that are longer than the model's context."""

    ERROR = "error"
    TRUNCATE = "truncate"
    DROP = "drop"


def fitting(source: ListedShapes, context_tokens: int, on_overlong: OnOverlong) -> ListedShapes:
    """A source of samples of at most ``context_tokens`` LLM tokens, with what became of the longer ones.

    A sample of which truncation leaves nothing is dropped; a source without longer ones is returned itself.
    """
    longer = source.shapes.llm_tokens > context_tokens
    if not np.any(longer):
        return source
    if on_overlong is OnOverlong.DROP:
        kept = source.shapes.take(np.flatnonzero(~longer))
        return replace(source, shapes=kept, num_dropped=int(longer.sum()))
    kept = truncated(source.shapes, context_tokens)
    num_dropped = len(source.shapes) - len(kept)
    return replace(source, shapes=kept, num_truncated=int(longer.sum()) - num_dropped, num_dropped=num_dropped)


def truncated(shapes: SampleShapes, context_tokens: int) -> SampleShapes:
    """The samples with at most ``context_tokens`` LLM tokens each: text goes first, items go whole, from the last.

    A sample keeps as many of its first items as fit, and beside them as much text as has room. Samples of which nothing
    is left are left out.
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
