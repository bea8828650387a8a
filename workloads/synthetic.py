"""Generated samples: blocks of a stream, of sizes tied by a Gaussian copula, packed pairs, or pixels and seconds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import ClassVar

import numpy as np
from scipy import special

from entrain_bench.base.arrays import FloatArray, IntArray, offsets_from_counts, sum_rows, take_rows
from entrain_bench.base.errors import UserError, require
from entrain_bench.specs.parse import check_mapping, parse
from entrain_bench.specs.shapes import Items, SampleShapes, concatenate, shapes_of
from entrain_bench.specs.tokens import MAX_TOKENS, TokenRules
from entrain_bench.specs.workload import one_of_two, stable_rng, stream_blocks

from .marginals import Marginal, RankCorrelation, draw_latents, latent_root, match_ranks, parse_marginal
from .tokens import MAX_ASPECT_RATIO, image_items, video_items

# The samples of a block, the unit of random access.
BLOCK_SAMPLES = 4096


class Generated:
    """A workload that its YAML describes in full."""

    __slots__ = ()

    def fingerprint(self) -> str:
        """Empty: there is no data."""
        return ""


@dataclass(slots=True)
class _Drawn:
    """The block a generator draws from, and how many samples it has drawn in all."""

    by: np.random.Generator | None = None
    block: SampleShapes | None = None
    num_samples: int = 0


@dataclass(frozen=True, slots=True)
class BlockSource(ABC):
    """A stream of samples of which a block is generated at once; ``name`` seeds them."""

    BLOCK_SAMPLES: ClassVar[int] = BLOCK_SAMPLES

    name: str
    _blocks: dict[tuple[int, int], SampleShapes] = field(default_factory=dict, repr=False, compare=False, kw_only=True)
    _drawn: _Drawn = field(default_factory=_Drawn, repr=False, compare=False, kw_only=True)

    @abstractmethod
    def generate(self, rng: np.random.Generator, first_id: int) -> SampleShapes:
        """A block of samples, numbered from ``first_id``."""

    def batch(self, iteration: int, num_samples: int, seed: int) -> SampleShapes:
        """Samples ``iteration * num_samples`` and following of the stream that belongs to the seed."""
        blocks = stream_blocks(iteration, num_samples, seed, self.BLOCK_SAMPLES)
        return concatenate([self._block(seed, block).take(np.arange(lo, hi)) for block, lo, hi in blocks])

    def draw(self, num_samples: int, rng: np.random.Generator) -> SampleShapes:
        """Independent samples, numbered in the order in which this generator drew them.

        A block is generated at a time; what a call leaves of it goes to the generator's next call.
        """
        require(num_samples >= 1, "num_samples", num_samples, "at least 1")
        drawn = self._drawn
        if drawn.by is not rng:
            drawn.by = rng
            drawn.num_samples = 0
        first = drawn.num_samples
        last = drawn.num_samples + num_samples
        parts = []
        while first < last:
            start = first - first % BLOCK_SAMPLES
            if first == start:
                drawn.block = self.generate(rng, start)
            end = min(last, start + BLOCK_SAMPLES)
            assert drawn.block is not None, "the first sample of a block generates it"
            parts.append(drawn.block.take(np.arange(first - start, end - start)))
            first = end
        drawn.num_samples = last
        return concatenate(parts)

    def _block(self, seed: int, block: int) -> SampleShapes:
        def make() -> SampleShapes:
            return self.generate(stable_rng(self.name, seed, block), block * self.BLOCK_SAMPLES)

        return one_of_two(self._blocks, (seed, block), make)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformMix(Generated):
    """Packed sequences of one length with images of one size (arXiv:2605.27678, section 5).

    Sizes are in LLM tokens. ``vision_share``, below 1, is that of vision tokens, which must make whole images.
    Encoder tokens follow the model's rules if their ratio is None.
    """

    name: str
    sequence_tokens: int
    vision_share: float
    image_tokens: int
    encoder_tokens_per_llm_token: float | None = None

    def __post_init__(self) -> None:
        fits = 1 <= self.sequence_tokens <= MAX_TOKENS
        require(fits, "workload.sequence_tokens", self.sequence_tokens, f"at least 1, at most {MAX_TOKENS}")
        require(self.image_tokens >= 1, "workload.image_tokens", self.image_tokens, "at least 1")
        rate = self.encoder_tokens_per_llm_token
        most = MAX_TOKENS / self.image_tokens
        given = rate is None or 0 < rate <= most
        require(given, "workload.encoder_tokens_per_llm_token", rate, f"null or above 0, at most {most:g}")
        require(0 <= self.vision_share < 1, "workload.vision_share", self.vision_share, "in [0, 1)")
        images = self._images()
        unit = f"a multiple of image_tokens / sequence_tokens = {self.image_tokens / self.sequence_tokens}"
        require(abs(images - round(images)) < 1e-6, "workload.vision_share", self.vision_share, unit)

    def source(self, rules: TokenRules) -> SyntheticSource:
        """The generator of samples."""
        num_images = round(self._images())
        images = {
            "llm_tokens": self.image_tokens,
            "items_per_sample": num_images,
            "encoder_tokens_per_llm_token": self.encoder_tokens_per_llm_token,
        }
        text = self.sequence_tokens - num_images * self.image_tokens
        return SyntheticWorkload(name=self.name, text=text, modalities={"image": images}).source(rules)

    def _images(self) -> float:
        return self.vision_share * self.sequence_tokens / self.image_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWorkload(Generated):
    """Samples of ``sequence_tokens`` LLM tokens, packed from pairs of a caption and an image in the order of the draw.

    A sample takes pairs as long as they fit; the pair that does not starts the next one. What is left is padding, which
    the LLM processes like text. ``caption`` is a distribution of text tokens, ``image`` of patches, both at least 1.
    """

    name: str
    sequence_tokens: int
    caption: float | Mapping[str, object]
    image: float | Mapping[str, object]

    def __post_init__(self) -> None:
        require(bool(self.name), "workload.name", repr(self.name), "text that is not empty")
        fits = 2 <= self.sequence_tokens <= MAX_TOKENS
        require(fits, "workload.sequence_tokens", self.sequence_tokens, f"at least 2, at most {MAX_TOKENS}")
        for key in ("caption", "image"):
            largest = float(parse_marginal(getattr(self, key), f"workload.{key}").ppf(np.array([1.0]))[0])
            fits = largest <= self.sequence_tokens // 2
            allowed = f"at most half of sequence_tokens={self.sequence_tokens}; set max"
            require(fits, f"workload.{key}", f"{largest:g} (at most)", allowed)

    def source(self, rules: TokenRules) -> PackedSource:
        """The generator of samples; a square of ``merge_patches`` patches becomes one LLM token.

        Raises ``UserError`` for sequences longer than the LLM takes: planners draw thousands before a run would say so.
        """
        most = rules.context_tokens or MAX_TOKENS
        field = "workload.sequence_tokens"
        allowed = f"at most {most}, the LLM's context_tokens"
        require(self.sequence_tokens <= most, field, self.sequence_tokens, allowed)
        caption, image = (parse_marginal(getattr(self, key), f"workload.{key}") for key in ("caption", "image"))
        return PackedSource(self.name, self.sequence_tokens, caption, image, rules.merge_patches**2)


@dataclass(frozen=True, slots=True)
class PackedSource(BlockSource):
    """Generator of packed samples; attributes as in ``PackedWorkload``, and the patches of an LLM token."""

    BLOCK_SAMPLES: ClassVar[int] = 256

    sequence_tokens: int
    caption: Marginal
    image: Marginal
    merged_patches: int

    def generate(self, rng: np.random.Generator, first_id: int) -> SampleShapes:
        """A block of samples, numbered from ``first_id``."""
        return self._pack(rng, self.BLOCK_SAMPLES, first_id)

    def draw(self, num_samples: int, rng: np.random.Generator) -> SampleShapes:
        """Independent samples."""
        require(num_samples >= 1, "num_samples", num_samples, "at least 1")
        return self._pack(rng, num_samples, 0)

    def _pack(self, rng: np.random.Generator, num_samples: int, first_id: int) -> SampleShapes:
        patches = np.zeros(0, np.int64)
        ends = list[int]()
        bounds = [0]
        while len(bounds) <= num_samples:
            filled = ends[bounds[-1] - 1] if bounds[-1] else 0
            # The first pair that does not fit; it must have been drawn.
            last = bisect_right(ends, filled + self.sequence_tokens, bounds[-1])
            if last < len(ends):
                bounds.append(last)
                continue
            more = _sizes(self.image, rng.random(16 * num_samples))
            pairs = self._projected(more) + _sizes(self.caption, rng.random(len(more)))
            ends += ((ends[-1] if ends else 0) + np.cumsum(pairs)).tolist()
            patches = np.append(patches, more)
        patches = patches[: bounds[-1]]
        projected = self._projected(patches)
        offsets = np.array(bounds)
        text = self.sequence_tokens - np.add.reduceat(projected, offsets[:-1])
        items = Items(np.diff(offsets), patches, projected)
        return shapes_of(text, {"image": items}, np.arange(first_id, first_id + num_samples))

    def _projected(self, patches: IntArray) -> IntArray:
        return -(-patches // self.merged_patches)


def _sizes(marginal: Marginal, u: FloatArray) -> IntArray:
    return np.maximum(1, marginal.rounded(u)).astype(np.int64)


# Qwen2.5-VL's limits for images and frames that it does not cut into tiles, in LLM tokens.
MAX_IMAGE_TOKENS = 16384
FRAME_TOKENS = (128, 768)


@dataclass(frozen=True, slots=True)
class _PicturesConfig:
    side: object
    aspect: object = 1.0
    count: object = 1


@dataclass(frozen=True, slots=True)
class _VideoConfig:
    seconds: object
    side: object = 640
    aspect: object = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelWorkload(Generated):
    """Samples of text with images or with a video, drawn from given distributions (``marginals``), all independent.

    Attributes:
        name: of the workload; seeds its samples.
        text: distribution of text tokens per sample, at least 1. Text gives way where a sample would be longer than the
            model's context.
        images: ``side`` (square root of an image's area, in whole pixels), ``aspect`` (width over height, default 1)
            and ``count`` (images of a sample, default 1); None: no images.
        video: ``seconds`` (whole), and ``side`` and ``aspect`` of a frame; None: no video.
    """

    name: str
    text: float | Mapping[str, object]
    images: Mapping[str, object] | None = None
    video: Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        require(bool(self.name), "workload.name", repr(self.name), "text that is not empty")
        if self.images is None and self.video is None:
            raise UserError("workload: must have images or video")
        self._parse()

    def source(self, rules: TokenRules) -> PixelSource:
        """The generator of samples for a model."""
        text, images, video = self._parse()
        return PixelSource(self.name, text, images, video, rules)

    def _parse(self) -> tuple[Marginal, dict[str, Marginal], dict[str, Marginal]]:
        images = _marginals(_PicturesConfig, self.images, "workload.images")
        video = _marginals(_VideoConfig, self.video, "workload.video")
        return parse_marginal(self.text, "workload.text"), images, video


def _marginals(
    kind: type[_PicturesConfig | _VideoConfig], given: Mapping[str, object] | None, where: str
) -> dict[str, Marginal]:
    if given is None:
        return {}
    values = asdict(parse(kind, check_mapping(given, where), where))
    return {name: parse_marginal(value, f"{where}.{name}") for name, value in values.items()}


@dataclass(frozen=True, slots=True)
class PixelSource(BlockSource):
    """Generator of the samples of a ``PixelWorkload``; an empty mapping: no images, or no videos."""

    text: Marginal
    images: Mapping[str, Marginal]
    video: Mapping[str, Marginal]
    rules: TokenRules

    def generate(self, rng: np.random.Generator, first_id: int) -> SampleShapes:
        """A block of samples, numbered from ``first_id``."""
        text = drawn_sizes(self.text, rng.random(BLOCK_SAMPLES), 1, "workload.text")
        items: dict[str, Items] = {}
        if self.images:
            counts = drawn_sizes(self.images["count"], rng.random(BLOCK_SAMPLES), 0, "workload.images.count")
            widths, heights = _sides(self.images, int(counts.sum()), rng, "workload.images")
            items["image"] = image_items(counts, widths, heights, self.rules, MAX_IMAGE_TOKENS)
        if self.video:
            seconds = drawn_sizes(self.video["seconds"], rng.random(BLOCK_SAMPLES), 1, "workload.video.seconds")
            widths, heights = _sides(self.video, BLOCK_SAMPLES, rng, "workload.video")
            items["video"] = video_items(seconds.astype(np.float64), widths, heights, self.rules, *FRAME_TOKENS)
        ids = np.arange(first_id, first_id + BLOCK_SAMPLES)
        shapes = shapes_of(text, items, ids)
        if self.rules.context_tokens is None:
            return shapes
        room = self.rules.context_tokens - (shapes.llm_tokens - text)
        return shapes_of(np.minimum(text, np.maximum(room, 1)), items, ids)


def _sides(
    marginals: Mapping[str, Marginal], total: int, rng: np.random.Generator, where: str
) -> tuple[FloatArray, FloatArray]:
    """Widths and heights in whole pixels ``[total]`` each."""
    side = drawn_sizes(marginals["side"], rng.random(total), 1, f"{where}.side").astype(np.float64)
    root = np.sqrt(np.clip(marginals["aspect"].ppf(rng.random(total)), 1 / MAX_ASPECT_RATIO, MAX_ASPECT_RATIO))
    return np.maximum(1.0, np.rint(side * root)), np.maximum(1.0, np.rint(side / root))
