"""Synthetic samples: chosen size distributions, tied together by a Gaussian copula."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from scipy import special

from entrain_bench.base.arrays import FloatArray, IntArray, offsets_from_counts, sum_rows, take_rows
from entrain_bench.base.errors import UserError, require
from entrain_bench.specs.parse import parse
from entrain_bench.specs.shapes import Items, SampleShapes, shapes_of
from entrain_bench.specs.tokens import TokenRules

from .copula import RankCorrelation, draw_latents, latent_root, match_ranks
from .marginals import Marginal, parse_marginal
from .sample_blocks import BLOCK_SAMPLES, BlockSource, Generated

_MAX_SIZE = 2**31 - 1
_MAX_BLOCK_ITEMS = 50_000_000
TEXT = "text"


@dataclass(frozen=True, slots=True)
class _ModalityConfig:
    llm_tokens: object
    items_per_sample: object = 1
    probability: float = 1.0
    encoder_tokens_per_llm_token: float | None = None


@dataclass(frozen=True, slots=True)
class _Modality:
    where: str
    llm_tokens: Marginal
    items_per_sample: Marginal
    probability: float
    encoder_tokens_per_llm_token: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticWorkload(Generated):
    """Samples drawn from given distributions (``marginals``; sizes are rounded to whole tokens).

    A sample's item count and the sizes of its items are independent draws. Per modality, samples with larger totals
    (LLM tokens of all items) then go to samples with a larger latent normal, and text follows its own latent normal;
    the normals' correlation is set so that totals and text have the given Spearman correlation. Ties (constants,
    samples without items) weaken it.

    Attributes:
        name: of the workload; seeds its samples.
        text: distribution of text tokens per sample; at least 1 is drawn.
        modalities: by name, ``llm_tokens`` (distribution of LLM tokens per item, at least 1), ``items_per_sample``
            (distribution, default 1), ``probability`` that a sample has the modality at all (default 1), and
            ``encoder_tokens_per_llm_token`` (null: from the model's rules, for image, video and audio).
        rank_correlation: one value for all pairs of modalities and text, or ``{name: {other: value}}``.
    """

    name: str
    text: float | Mapping[str, object]
    modalities: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    rank_correlation: RankCorrelation = 0.0

    def __post_init__(self) -> None:
        require(bool(self.name), "workload.name", repr(self.name), "text that is not empty")
        self._parse({})

    def source(self, rules: TokenRules) -> SyntheticSource:
        """The generator of samples; ``UserError`` if neither YAML nor rules give a modality's encoder tokens."""
        vision = float(rules.merge_patches**2)
        source = self._parse({"image": vision, "video": vision, "audio": float(rules.audio_merge_frames)})
        for modality in source.modalities.values():
            key = f"{modality.where}.encoder_tokens_per_llm_token"
            known = modality.encoder_tokens_per_llm_token is not None
            require(known, key, "null", "a number: only image, video and audio have rules in the model")
        return source

    def _parse(self, rates: Mapping[str, float]) -> SyntheticSource:
        modalities = {}
        for name, config in self.modalities.items():
            where = f"workload.modalities.{name}"
            require(name != TEXT, where, "...", "another name: text has its own key")
            modalities[str(name)] = _parse_modality(config, where, rates.get(str(name)))
        root = latent_root((TEXT, *modalities), self.rank_correlation, "workload.rank_correlation")
        return SyntheticSource(self.name, parse_marginal(self.text, "workload.text"), modalities, root)


@dataclass(frozen=True, slots=True)
class SyntheticSource(BlockSource):
    """Generator of a synthetic workload's samples.

    ``root`` is that of the latent correlation, text first ``[1 + modalities, 1 + modalities]``.
    """

    text: Marginal
    modalities: Mapping[str, _Modality]
    root: FloatArray

    def generate(self, rng: np.random.Generator, first_id: int) -> SampleShapes:
        """A block of samples, numbered from ``first_id``."""
        latents = draw_latents(self.root, BLOCK_SAMPLES, rng)
        text = drawn_sizes(self.text, np.asarray(special.ndtr(latents[:, 0])), 1, "workload.text")
        items = {
            name: _draw_items(modality, latents[:, 1 + index], rng)
            for index, (name, modality) in enumerate(self.modalities.items())
        }
        return shapes_of(text, items, np.arange(first_id, first_id + BLOCK_SAMPLES))


def _parse_modality(config: object, where: str, rate: float | None) -> _Modality:
    if not isinstance(config, Mapping):
        raise UserError(f"{where}={config}: must be a mapping with llm_tokens")
    values = parse(_ModalityConfig, config, where)
    require(0 <= values.probability <= 1, f"{where}.probability", values.probability, "from 0 to 1")
    given = values.encoder_tokens_per_llm_token
    if given is not None:
        valid = isinstance(given, int | float) and not isinstance(given, bool) and 0 < given <= _MAX_SIZE
        require(valid, f"{where}.encoder_tokens_per_llm_token", given, "a number above 0, or null")
    return _Modality(
        where,
        parse_marginal(values.llm_tokens, f"{where}.llm_tokens"),
        parse_marginal(values.items_per_sample, f"{where}.items_per_sample"),
        values.probability,
        rate if given is None else given,
    )


def _draw_items(modality: _Modality, latent: FloatArray, rng: np.random.Generator) -> Items:
    samples = len(latent)
    where = modality.where
    present = rng.random(samples) < modality.probability
    counts = present * drawn_sizes(modality.items_per_sample, rng.random(samples), 0, f"{where}.items_per_sample")
    total = int(counts.sum())
    allowed = f"at most {_MAX_BLOCK_ITEMS // samples} on average"
    require(total <= _MAX_BLOCK_ITEMS, f"{where}.items_per_sample", f"{total // samples} (drawn)", allowed)
    llm = drawn_sizes(modality.llm_tokens, rng.random(total), 1, f"{where}.llm_tokens")
    offsets = offsets_from_counts(counts)
    # Within a block: pooled over blocks that costs a correlation 2 / BLOCK_SAMPLES of its value.
    bundle = match_ranks(sum_rows(offsets, llm.astype(np.float64)).astype(np.int64), latent)
    new_offsets, positions = take_rows(offsets, bundle)
    llm = llm[positions]
    return Items(
        np.diff(new_offsets),
        np.maximum(1, np.rint(llm * (modality.encoder_tokens_per_llm_token or 1.0))).astype(np.int64),
        llm,
    )


def drawn_sizes(marginal: Marginal, u: FloatArray, least: int, where: str) -> IntArray:
    """Whole sizes of at least ``least`` at probabilities ``u`` in [0, 1) ``[draws]``."""
    sizes = np.maximum(least, marginal.rounded(u))
    largest = sizes.max(initial=0)
    require(bool(largest <= _MAX_SIZE), where, f"{largest:g} (drawn)", f"at most {_MAX_SIZE}; set max")
    return sizes.astype(np.int64)
