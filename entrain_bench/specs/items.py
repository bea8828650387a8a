"""Items of one modality, and how modalities and batches are put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from entrain_bench.base.arrays import IntArray, TextArray, offsets_from_counts
from entrain_bench.base.errors import require
from entrain_bench.specs.shapes import SampleShapes


@dataclass(frozen=True, slots=True)
class Items:
    """Items of one modality, grouped by sample.

    Attributes:
        counts: items of each sample ``[samples]``.
        encoder_tokens: tokens inside the encoder ``[items]``.
        llm_tokens: projected tokens handed to the LLM ``[items]``.
        grids: rows and columns of the encoder tokens ``[items, 2]``; None if they are not known.
    """

    counts: IntArray
    encoder_tokens: IntArray
    llm_tokens: IntArray
    grids: IntArray | None = None


def shapes_of(
    text_tokens: IntArray, modalities: Mapping[str, Items], sample_ids: IntArray | TextArray | None = None
) -> SampleShapes:
    """Return the shapes of samples with items of several modalities, in the mapping's order within a sample.

    Args:
        text_tokens: text tokens of each sample ``[samples]``.
        modalities: items of each modality, by its name.
        sample_ids: unique integers or strings ``[samples]``; default: row numbers. Strings appear in messages.

    Raises:
        UserError: if lengths of columns do not fit together, or sizes are not positive.
    """
    text = np.asarray(text_tokens, np.int64)
    parts = list(modalities.values())
    for name, part in modalities.items():
        owned = int(np.sum(part.counts))
        require(len(part.counts) == len(text), f"{name}: counts", len(part.counts), f"of all {len(text)} samples")
        for tokens in (part.encoder_tokens, part.llm_tokens):
            require(len(tokens) == owned, f"{name}: items", len(tokens), f"{owned}, the sum of counts")
    counts = np.zeros(len(text), np.int64)
    for part in parts:
        counts += part.counts
    owners = [np.repeat(np.arange(len(text)), part.counts) for part in parts]
    order = np.argsort(_joined(owners), kind="stable")
    kinds = [np.full(len(part.llm_tokens), index) for index, part in enumerate(parts)]
    numbers, sample_names = _identities(sample_ids, len(text))
    return SampleShapes(
        tuple(modalities),
        numbers,
        text,
        offsets_from_counts(counts),
        _joined(kinds)[order],
        _joined([part.encoder_tokens for part in parts])[order],
        _joined([part.llm_tokens for part in parts])[order],
        sample_names,
        None if (grids := _grids([(part.grids, len(part.llm_tokens)) for part in parts])) is None else grids[order],
    )


def concatenate(parts: Sequence[SampleShapes]) -> SampleShapes:
    """The samples of several shapes with the same modalities, one after another."""
    return SampleShapes(
        parts[0].modalities,
        _joined([part.sample_ids for part in parts]),
        _joined([part.text_tokens for part in parts]),
        offsets_from_counts(_joined([np.diff(part.item_offsets) for part in parts])),
        _joined([part.item_modality for part in parts]),
        _joined([part.item_encoder_tokens for part in parts]),
        _joined([part.item_llm_tokens for part in parts]),
        np.concatenate([_names(part) for part in parts])
        if any(part.sample_names is not None for part in parts)
        else None,
        _grids([(part.item_grids, part.num_items) for part in parts]),
    )


def _identities(given: IntArray | TextArray | None, num_samples: int) -> tuple[IntArray, TextArray | None]:
    """Numbers of samples, and names if strings are given."""
    if given is None:
        return np.arange(num_samples), None
    if given.dtype.kind in "iu":
        return given.astype(np.int64, copy=False), None
    return np.arange(num_samples), given.astype(np.object_)


def _names(shapes: SampleShapes) -> TextArray:
    return np.array([shapes.name_of(sample) for sample in range(len(shapes))], np.object_)


def _grids(parts: Sequence[tuple[IntArray | None, int]]) -> IntArray | None:
    """Grids of several items, 0 for those of a part that knows none; None if no part knows any."""
    if all(grids is None for grids, _ in parts):
        return None
    return np.concatenate([np.zeros((count, 2), np.int64) if grids is None else grids for grids, count in parts])


def _joined(arrays: Sequence[IntArray]) -> IntArray:
    return np.concatenate([np.zeros(0, np.int64), *arrays])
