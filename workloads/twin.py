"""Synthetic twins: samples with the distribution of a trace's, in any number; none is copied from it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import special

from entrain_bench.base.arrays import FloatArray, IntArray, rows_of
from entrain_bench.specs.shapes import Items, SampleShapes, shapes_of
from entrain_bench.specs.tokens import TokenRules

from .marginals import draw_latents, nearest_root
from .synthetic import BlockSource
from .trace import TraceWorkload, truncated

# Points of a distribution between which sizes are interpolated, and the number of its largest values.
_KNOTS = 1025
_TAIL = 64
# Decimals of a correlation, which last digits of its sums do not reach; and the samples below which it says nothing.
_DECIMALS = 4
_LEAST_SAMPLES = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinWorkload(TraceWorkload):
    """A trace's marginals and rank correlations (Gaussian copula), under a model's token rules.

    Of every modality the number of items and their mean size are drawn together with the text; sizes vary around a
    sample's mean as in the trace, independently. Clusters and dependence of the tails are lost.
    """

    def __post_init__(self) -> None:
        # A dataclass with slots is recreated: the empty super() would look for another class.
        TraceWorkload.__post_init__(self)
        if self.name == Path(self.path).stem:
            object.__setattr__(self, "name", f"{self.name}_twin")

    def source(self, rules: TokenRules) -> BlockSource:  # type: ignore[override]
        """The generator of samples; ``UserError`` as of a trace."""
        return fit(self.name, TraceWorkload.source(self, rules).shapes, rules.context_tokens)


# Values at probabilities in [0, 1), element by element.
type Inverse = Callable[[FloatArray], FloatArray]


def _interpolated(values: FloatArray) -> Inverse:
    """A distribution of sizes: values at probabilities, straight lines between."""
    total = len(values)
    grid = np.floor(np.linspace(0, total - 1, min(total, _KNOTS))).astype(np.int64)
    places = np.union1d(grid, np.arange(max(0, total - _TAIL), total))
    return partial(np.interp, xp=(places + 0.5) / total, fp=np.sort(values, kind="stable")[places])  # type: ignore[return-value]


def _drawn_counts(counts: IntArray, u: FloatArray) -> IntArray:
    """Return counts with the given frequencies, by inverse CDF at probabilities in [0, 1)."""
    distinct, many = np.unique(counts, return_counts=True)
    places = np.searchsorted(np.cumsum(many) / len(counts), u, side="right")
    return distinct[np.minimum(places, len(distinct) - 1)]


@dataclass(frozen=True, slots=True)
class _Modality:
    """Items of one modality: their number and mean LLM tokens by sample, and, where several, sizes over that mean.

    ``encoder_tokens`` are every item's; 0: ``encoder_ratio`` times its LLM tokens.
    """

    counts: IntArray
    means: Inverse
    spread: Inverse | None
    least: int
    most: int
    encoder_tokens: int
    encoder_ratio: float

    def draw(self, count_u: FloatArray, mean_u: FloatArray, rng: np.random.Generator) -> Items:
        counts = _drawn_counts(self.counts, count_u)
        sizes = np.repeat(self.means(mean_u), counts)
        if self.spread is not None:
            several = np.repeat(counts > 1, counts)
            sizes = sizes * np.where(several, self.spread(rng.random(len(sizes))), 1.0)
        llm = np.clip(np.rint(sizes), self.least, self.most).astype(np.int64)
        encoder = np.maximum(1, np.rint(llm * self.encoder_ratio)).astype(np.int64)
        return Items(counts, np.full_like(llm, self.encoder_tokens) if self.encoder_tokens else encoder, llm)


def _twin_samples(
    text: Inverse,
    modalities: Mapping[str, _Modality],
    root: FloatArray,
    context_tokens: int | None,
    rng: np.random.Generator,
    num_samples: int,
    first_id: int,
) -> SampleShapes:
    """Samples; ``root`` is that of the latent correlation of text and, of every modality, counts and means."""
    u = np.asarray(special.ndtr(draw_latents(root, num_samples, rng)))
    text_tokens = np.rint(text(u[:, 0])).astype(np.int64)
    items = {
        name: modality.draw(u[:, 1 + 2 * index], u[:, 2 + 2 * index], rng)
        for index, (name, modality) in enumerate(modalities.items())
    }
    owned = sum((part.counts for part in items.values()), np.zeros(num_samples, np.int64))
    text_tokens = np.where(owned > 0, text_tokens, np.maximum(1, text_tokens))
    shapes = shapes_of(text_tokens, items, np.arange(first_id, first_id + num_samples))
    return shapes if context_tokens is None else truncated(shapes, context_tokens)


def fit(name: str, shapes: SampleShapes, context_tokens: int | None) -> BlockSource:
    """The twin of samples; ``name`` seeds its own, which have at most ``context_tokens``, None: any number."""
    modalities = dict[str, _Modality]()
    columns = [shapes.text_tokens.astype(np.float64)]
    for modality in shapes.modalities:
        items = shapes.items_of([modality])
        if not items.size:
            continue
        llm = shapes.item_llm_tokens[items].astype(np.float64)
        encoder = shapes.item_encoder_tokens[items]
        owners = rows_of(shapes.item_offsets)[items]
        counts = np.bincount(owners, minlength=len(shapes))
        total = np.bincount(owners, weights=llm, minlength=len(shapes))
        means = np.where(counts > 0, total / np.maximum(counts, 1), np.nan)
        ratios = (llm / means[owners])[counts[owners] > 1]
        modalities[modality] = _Modality(
            counts,
            _interpolated(means[counts > 0]),
            _interpolated(ratios) if np.any(ratios != 1) else None,
            int(llm.min()),
            int(llm.max()),
            int(encoder[0]) if np.all(encoder == encoder[0]) else 0,
            float(encoder.sum() / llm.sum()),
        )
        columns += [counts.astype(np.float64), means]
    # Spearman's, over the samples that have both; 0 of few, and without spread.
    correlations = pd.DataFrame(dict(enumerate(columns))).corr("spearman", _LEAST_SAMPLES)
    matrix = correlations.fillna(0.0).round(_DECIMALS).to_numpy(copy=True)
    np.fill_diagonal(matrix, 1.0)
    generate = partial(_twin_samples, _interpolated(columns[0]), modalities, nearest_root(matrix), context_tokens)
    return BlockSource(name, generate)
