"""Synthetic twins: samples drawn like those of a trace, as many as wanted, of which none is in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import special

from entrain_bench.base.arrays import FloatArray, IntArray, rows_of
from entrain_bench.specs.shapes import Items, SampleShapes, shapes_of
from entrain_bench.specs.tokens import TokenRules

from .marginals import draw_latents, nearest_root
from .synthetic import BLOCK_SAMPLES, BlockSource
from .trace import TraceWorkload, truncated

# Points of a distribution between which sizes are interpolated, and beside them its largest values.
_KNOTS = 1025
_TAIL = 64
# Decimals of a correlation, which last digits of its sums do not reach; and the samples below which it says nothing.
_DECIMALS = 4
_LEAST_SAMPLES = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinWorkload(TraceWorkload):
    """A trace's marginals and rank correlations (Gaussian copula), under a model's token rules.

    Of every modality the number of items and their mean size are drawn together with the text; sizes vary around a
    sample's mean as they do in the trace, independently. What a copula does not hold (clusters, dependence of the
    tails) the twin has not.
    """

    def __post_init__(self) -> None:
        # A dataclass with slots is made anew: the empty super() would look for another class.
        TraceWorkload.__post_init__(self)
        if self.name == Path(self.path).stem:
            object.__setattr__(self, "name", f"{self.name}_twin")

    def source(self, rules: TokenRules) -> TwinSource:  # type: ignore[override]
        """The generator of samples; ``UserError`` as of a trace."""
        trace = TraceWorkload(**{field.name: getattr(self, field.name) for field in fields(TraceWorkload)})
        return fit(self.name, trace.source(rules).shapes, rules.context_tokens)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """A distribution of sizes: values at probabilities, straight lines between."""

    probabilities: FloatArray
    values: FloatArray

    @classmethod
    def of(cls, values: FloatArray) -> _Sizes:
        total = len(values)
        grid = np.floor(np.linspace(0, total - 1, min(total, _KNOTS))).astype(np.int64)
        places = np.union1d(grid, np.arange(max(0, total - _TAIL), total))
        return cls((places + 0.5) / total, np.sort(values, kind="stable")[places])

    def at(self, u: FloatArray) -> FloatArray:
        return np.interp(u, self.probabilities, self.values)


@dataclass(frozen=True, slots=True)
class _Counts:
    """A distribution of whole numbers."""

    cumulative: FloatArray
    values: IntArray

    @classmethod
    def of(cls, values: IntArray) -> _Counts:
        distinct, many = np.unique(values, return_counts=True)
        return cls(np.cumsum(many) / len(values), distinct)

    def at(self, u: FloatArray) -> IntArray:
        return self.values[np.minimum(np.searchsorted(self.cumulative, u, side="right"), len(self.values) - 1)]


@dataclass(frozen=True, slots=True)
class _Modality:
    """Items of one modality: their number and mean LLM tokens by sample, and, where several, sizes over that mean.

    ``encoder_tokens`` are every item's; 0: ``encoder_ratio`` times its LLM tokens.
    """

    counts: _Counts
    means: _Sizes
    spread: _Sizes | None
    least: int
    most: int
    encoder_tokens: int
    encoder_ratio: float

    def draw(self, count_u: FloatArray, mean_u: FloatArray, rng: np.random.Generator) -> Items:
        counts = self.counts.at(count_u)
        sizes = np.repeat(self.means.at(mean_u), counts)
        if self.spread is not None:
            several = np.repeat(counts > 1, counts)
            sizes = sizes * np.where(several, self.spread.at(rng.random(len(sizes))), 1.0)
        llm = np.clip(np.rint(sizes), self.least, self.most).astype(np.int64)
        encoder = np.maximum(1, np.rint(llm * self.encoder_ratio)).astype(np.int64)
        return Items(counts, np.full_like(llm, self.encoder_tokens) if self.encoder_tokens else encoder, llm)


@dataclass(frozen=True, slots=True)
class TwinSource(BlockSource):
    """Generator of a twin's samples.

    ``root`` is that of the latent correlation of text and, of every modality, counts and means.
    """

    text: _Sizes
    modalities: Mapping[str, _Modality]
    root: FloatArray
    context_tokens: int | None

    def generate(self, rng: np.random.Generator, first_id: int) -> SampleShapes:
        """A block of samples, numbered from ``first_id``."""
        u = np.asarray(special.ndtr(draw_latents(self.root, BLOCK_SAMPLES, rng)))
        text = np.rint(self.text.at(u[:, 0])).astype(np.int64)
        items = {
            name: modality.draw(u[:, 1 + 2 * index], u[:, 2 + 2 * index], rng)
            for index, (name, modality) in enumerate(self.modalities.items())
        }
        owned = sum((part.counts for part in items.values()), np.zeros(BLOCK_SAMPLES, np.int64))
        shapes = shapes_of(
            np.where(owned > 0, text, np.maximum(1, text)), items, np.arange(first_id, first_id + BLOCK_SAMPLES)
        )
        return shapes if self.context_tokens is None else truncated(shapes, self.context_tokens)


def fit(name: str, shapes: SampleShapes, context_tokens: int | None) -> TwinSource:
    """The twin of samples; ``name`` seeds its own, which have at most ``context_tokens``, None: any number."""
    modalities = dict[str, _Modality]()
    columns = [shapes.text_tokens.astype(np.float64)]
    for modality in shapes.modalities:
        items = shapes.items_of([modality])
        if not items.size:
            continue
        llm = shapes.item_llm_tokens[items].astype(np.float64)
        owners = rows_of(shapes.item_offsets)[items]
        counts = np.bincount(owners, minlength=len(shapes))
        total = np.bincount(owners, weights=llm, minlength=len(shapes))
        means = np.where(counts > 0, total / np.maximum(counts, 1), np.nan)
        modalities[modality] = _fitted(counts, means, owners, llm, shapes.item_encoder_tokens[items])
        columns += [counts.astype(np.float64), means]
    root = nearest_root(_rank_correlations(columns))
    return TwinSource(name, _Sizes.of(columns[0]), modalities, root, context_tokens)


def _fitted(counts: IntArray, means: FloatArray, owners: IntArray, llm: FloatArray, encoder: IntArray) -> _Modality:
    several = counts[owners] > 1
    ratios = (llm / means[owners])[several]
    constant = int(encoder[0]) if np.all(encoder == encoder[0]) else 0
    return _Modality(
        _Counts.of(counts),
        _Sizes.of(means[counts > 0]),
        _Sizes.of(ratios) if several.any() and np.any(ratios != 1) else None,
        int(llm.min()),
        int(llm.max()),
        constant,
        float(encoder.sum() / llm.sum()),
    )


def _rank_correlations(columns: Sequence[FloatArray]) -> FloatArray:
    """Spearman correlations ``[columns, columns]`` over the samples that have both; 0 of few, and without spread."""
    found = pd.DataFrame(dict(enumerate(columns))).corr("spearman", _LEAST_SAMPLES)
    matrix = found.fillna(0.0).round(_DECIMALS).to_numpy(copy=True)
    np.fill_diagonal(matrix, 1.0)
    return matrix
