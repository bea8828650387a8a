"""Items of one modality, and how modalities and batches are put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from entrain_bench.arrays import IntArray, offsets_from_counts
from entrain_bench.specs.shapes import SampleShapes


@dataclass(frozen=True, slots=True)
class Items:
    """Items of one modality, grouped by sample.

    Attributes:
        counts: items of each sample ``[samples]``.
        encoder_tokens: tokens inside the encoder ``[items]``.
        llm_tokens: projected tokens handed to the LLM ``[items]``.
    """

    counts: IntArray
    encoder_tokens: IntArray
    llm_tokens: IntArray


def merge(sample_ids: IntArray, text_tokens: IntArray, modalities: Mapping[str, Items]) -> SampleShapes:
    """Shapes of samples that own items of several modalities; within a sample the mapping's order holds."""
    parts = list(modalities.values())
    counts = np.zeros(len(sample_ids), np.int64)
    for part in parts:
        counts += part.counts
    owners = [np.repeat(np.arange(len(sample_ids)), part.counts) for part in parts]
    order = np.argsort(_joined(owners), kind="stable")
    kinds = [np.full(len(part.llm_tokens), index) for index, part in enumerate(parts)]
    return SampleShapes(
        tuple(modalities),
        sample_ids,
        text_tokens,
        offsets_from_counts(counts),
        _joined(kinds)[order],
        _joined([part.encoder_tokens for part in parts])[order],
        _joined([part.llm_tokens for part in parts])[order],
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
    )


def _joined(arrays: Sequence[IntArray]) -> IntArray:
    return np.concatenate([np.zeros(0, np.int64), *arrays])
