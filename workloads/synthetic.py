"""Generated samples: blocks of a stream, of sizes tied by a Gaussian copula, packed pairs, or pixels and seconds."""

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Annotated, Any

import numpy as np
from numpy.random import Generator
from scipy import special

from entrain_bench.base.arrays import FloatArray, IntArray, offsets_from_counts, sum_rows, take_rows
from entrain_bench.base.errors import UserError, require
from entrain_bench.specs.parse import Allowed, at_least, between, parse
from entrain_bench.specs.shapes import Items, SampleShapes, concatenate, shapes_of
from entrain_bench.specs.tokens import MAX_TOKENS, TokenRules
from entrain_bench.specs.workload import one_of_two, stable_rng, stream_blocks

from .marginals import Marginal, RankCorrelation, draw_latents, latent_root, match_ranks, parse_marginal
from .tokens import MAX_ASPECT_RATIO, image_items, video_items

# The samples of a block, the unit of random access.
BLOCK_SAMPLES = 4096
_PACKED_BLOCK_SAMPLES = 256
_MAX_SIZE = 2**31 - 1
_MAX_BLOCK_ITEMS = 50_000_000
TEXT = "text"
Name = Annotated[str, Allowed(bool, "text that is not empty")]
Ratio = Annotated[float, Allowed(lambda value: 0 < value <= 1e6, "null or above 0, at most 1e6")]
type Distribution = float | Mapping[str, object]


@dataclass(slots=True)
class _Drawn:
    """The block a generator draws from, and how many samples it has drawn in all."""

    by: Generator | None = None
    block: SampleShapes | None = None
    num_samples: int = 0


@dataclass(frozen=True, slots=True)
class BlockSource:
    """A stream of samples of which a block is generated at once; ``name`` seeds them.

    ``generate`` takes a generator, the number of samples and the number of the first one.
    """

    name: str
    generate: Callable[[Generator, int, int], SampleShapes]
    block_samples: int = BLOCK_SAMPLES
    _blocks: dict[tuple[int, int], SampleShapes] = field(default_factory=dict, repr=False, compare=False)
    _drawn: _Drawn = field(default_factory=_Drawn, repr=False, compare=False)

    def batch(self, iteration: int, num_samples: int, seed: int) -> SampleShapes:
        """Samples ``iteration * num_samples`` and following of the stream that belongs to the seed."""
        blocks = stream_blocks(iteration, num_samples, seed, self.block_samples)
        return concatenate([self._block(seed, block).take(np.arange(lo, hi)) for block, lo, hi in blocks])

    def draw(self, num_samples: int, rng: Generator) -> SampleShapes:
        """Independent samples, numbered in the order in which this generator drew them.

        A block is generated at a time; its unused samples go to the generator's next call.
        """
        require(num_samples >= 1, "num_samples", num_samples, "at least 1")
        drawn = self._drawn
        if drawn.by is not rng:
            drawn.by = rng
            drawn.num_samples = 0
        parts = []
        missing = num_samples
        while missing:
            place = drawn.num_samples % self.block_samples
            if not place:
                drawn.block = self.generate(rng, self.block_samples, drawn.num_samples)
            assert drawn.block is not None, "the first sample of a block generates it"
            taken = min(missing, self.block_samples - place)
            parts.append(drawn.block.take(np.arange(place, place + taken)))
            drawn.num_samples += taken
            missing -= taken
        return concatenate(parts)

    def _block(self, seed: int, block: int) -> SampleShapes:
        def make() -> SampleShapes:
            rng = stable_rng(self.name, seed, block)
            return self.generate(rng, self.block_samples, block * self.block_samples)

        return one_of_two(self._blocks, (seed, block), make)


class PackedSource(BlockSource):
    """A stream in which a draw generates exactly the samples that it returns."""

    def draw(self, num_samples: int, rng: Generator) -> SampleShapes:
        """Independent samples."""
        require(num_samples >= 1, "num_samples", num_samples, "at least 1")
        return self.generate(rng, num_samples, 0)


class Generated:
    """A workload that its YAML describes in full."""

    __slots__ = ()

    def fingerprint(self) -> str:
        """Empty: there is no data."""
        return ""


@dataclass(frozen=True, slots=True)
class _Modality:
    """Marginals, in YAML as configured; a ratio that is None follows the model's rules."""

    llm_tokens: Any
    items_per_sample: Any = 1
    probability: Annotated[float, between(0, 1)] = 1.0
    encoder_tokens_per_llm_token: Ratio | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticWorkload(Generated):
    """Samples drawn from given distributions (``marginals``; sizes are rounded to whole tokens).

    A sample's item count and the sizes of its items are independent draws. Per modality, larger totals (LLM tokens of
    all items) then go to samples with a larger latent normal; text follows its own latent normal. The normals'
    correlation gives totals and text the configured Spearman correlation. Ties weaken it.

    ``text`` is a distribution of text tokens per sample; experiments/workload/synthetic.yaml explains the other keys.
    """

    name: Name
    text: Distribution
    modalities: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    rank_correlation: RankCorrelation = 0.0

    def __post_init__(self) -> None:
        self._parse()

    def source(self, rules: TokenRules) -> BlockSource:
        """The generator of samples; ``UserError`` if neither YAML nor rules give a modality's encoder tokens."""
        vision = float(rules.merge_patches**2)
        rates = {"image": vision, "video": vision, "audio": float(rules.audio_merge_frames)}
        text, modalities, root = self._parse()
        for name, modality in modalities.items():
            rate = modality.encoder_tokens_per_llm_token or rates.get(name)
            key = f"workload.modalities.{name}.encoder_tokens_per_llm_token"
            require(rate is not None, key, "null", "a number: only image, video and audio have rules in the model")
            modalities[name] = replace(modality, encoder_tokens_per_llm_token=rate)
        return BlockSource(self.name, partial(_tied_samples, text, modalities, root))

    def _parse(self) -> tuple[Marginal, dict[str, _Modality], FloatArray]:
        """Text, modalities, and the root of the latent correlation, text first ``[1 + modalities, 1 + modalities]``."""
        modalities = dict[str, _Modality]()
        for name, config in self.modalities.items():
            where = f"workload.modalities.{name}"
            require(name != TEXT, where, "...", "another name: text has its own key")
            given = parse(_Modality, config, where)
            llm_tokens = parse_marginal(given.llm_tokens, f"{where}.llm_tokens")
            items = parse_marginal(given.items_per_sample, f"{where}.items_per_sample")
            modalities[str(name)] = replace(given, llm_tokens=llm_tokens, items_per_sample=items)
        root = latent_root((TEXT, *modalities), self.rank_correlation, "workload.rank_correlation")
        return parse_marginal(self.text, "workload.text"), modalities, root


def _tied_samples(
    text: Marginal, modalities: Mapping[str, _Modality], root: FloatArray, rng: Generator, count: int, first_id: int
) -> SampleShapes:
    latents = draw_latents(root, count, rng)
    text_tokens = drawn_sizes(text, np.asarray(special.ndtr(latents[:, 0])), 1, "workload.text")
    items = {
        name: _tied_items(modality, f"workload.modalities.{name}", latents[:, 1 + index], rng)
        for index, (name, modality) in enumerate(modalities.items())
    }
    return shapes_of(text_tokens, items, np.arange(first_id, first_id + count))


def _tied_items(modality: _Modality, where: str, latent: FloatArray, rng: Generator) -> Items:
    samples = len(latent)
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
    assert modality.encoder_tokens_per_llm_token is not None
    encoder = np.maximum(1, np.rint(llm * modality.encoder_tokens_per_llm_token)).astype(np.int64)
    return Items(np.diff(new_offsets), encoder, llm)


def drawn_sizes(marginal: Marginal, u: FloatArray, least: int, where: str) -> IntArray:
    """Whole sizes of at least ``least`` at probabilities ``u`` in [0, 1) ``[draws]``."""
    sizes = np.maximum(least, np.rint(marginal.ppf(u)))
    largest = sizes.max(initial=0)
    require(bool(largest <= _MAX_SIZE), where, f"{largest:g} (drawn)", f"at most {_MAX_SIZE}; set max")
    return sizes.astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformMix(Generated):
    """Packed sequences of one length with images of one size (arXiv:2605.27678, section 5).

    Sizes are in LLM tokens. ``vision_share``, below 1, is that of vision tokens, which must make whole images.
    Encoder tokens follow the model's rules if their ratio is None.
    """

    name: Name
    sequence_tokens: Annotated[int, between(1, MAX_TOKENS)]
    vision_share: Annotated[float, Allowed(lambda value: 0 <= value < 1, "in [0, 1)")]
    image_tokens: Annotated[int, at_least(1)]
    encoder_tokens_per_llm_token: Ratio | None = None

    def __post_init__(self) -> None:
        images = self._images()
        unit = f"a multiple of image_tokens / sequence_tokens = {self.image_tokens / self.sequence_tokens}"
        require(abs(images - round(images)) < 1e-6, "workload.vision_share", self.vision_share, unit)

    def source(self, rules: TokenRules) -> BlockSource:
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

    A sample takes pairs as long as they fit; the pair that does not starts the next one. The rest is padding, which the
    LLM processes like text. ``caption`` is a distribution of text tokens, ``image`` of patches, both at least 1.
    """

    name: Name
    sequence_tokens: Annotated[int, between(2, MAX_TOKENS)]
    caption: Distribution
    image: Distribution

    def __post_init__(self) -> None:
        for key in ("caption", "image"):
            largest = float(self._marginal(key).ppf(np.array([1.0]))[0])
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
        return PackedSource(self.name, partial(self._pack, rules.merge_patches**2), _PACKED_BLOCK_SAMPLES)

    def _pack(self, merged_patches: int, rng: Generator, count: int, first_id: int) -> SampleShapes:
        caption = self._marginal("caption")
        image = self._marginal("image")
        patches = np.zeros(0, np.int64)
        ends = list[int]()
        bounds = [0]
        while len(bounds) <= count:
            filled = ends[bounds[-1] - 1] if bounds[-1] else 0
            # The first pair that does not fit; it must have been drawn.
            last = bisect_right(ends, filled + self.sequence_tokens, bounds[-1])
            if last < len(ends):
                bounds.append(last)
                continue
            more = drawn_sizes(image, rng.random(16 * count), 1, "workload.image")
            text = drawn_sizes(caption, rng.random(len(more)), 1, "workload.caption")
            ends += ((ends[-1] if ends else 0) + np.cumsum(-(-more // merged_patches) + text)).tolist()
            patches = np.append(patches, more)
        patches = patches[: bounds[-1]]
        projected = -(-patches // merged_patches)
        offsets = np.array(bounds)
        padded_text = self.sequence_tokens - np.add.reduceat(projected, offsets[:-1])
        images = Items(np.diff(offsets), patches, projected)
        return shapes_of(padded_text, {"image": images}, np.arange(first_id, first_id + count))

    def _marginal(self, key: str) -> Marginal:
        return parse_marginal(getattr(self, key), f"workload.{key}")


# Qwen2.5-VL's limits for images and frames that it does not cut into tiles, in LLM tokens.
MAX_IMAGE_TOKENS = 16384
FRAME_TOKENS = (128, 768)


@dataclass(frozen=True, slots=True)
class _Pictures:
    side: object
    aspect: object = 1.0
    count: object = 1


@dataclass(frozen=True, slots=True)
class _Video:
    seconds: object
    side: object = 640
    aspect: object = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelWorkload(Generated):
    """Samples of text with images or with a video, drawn from given distributions (``marginals``), all independent.

    Text tokens are at least 1, and fewer where a sample would be longer than the model's context. ``side`` of images
    and frames is the square root of their area in whole pixels, ``aspect`` is width over height, ``count`` is of
    images, ``seconds`` are whole.
    """

    name: Name
    text: Distribution
    images: Mapping[str, object] | None = None
    video: Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        if self.images is None and self.video is None:
            raise UserError("workload: must have images or video")
        self._parse()

    def source(self, rules: TokenRules) -> BlockSource:
        """The generator of samples for a model."""
        return BlockSource(self.name, partial(self._draw, rules))

    def _draw(self, rules: TokenRules, rng: Generator, count: int, first_id: int) -> SampleShapes:
        text, images, video = self._parse()
        text_tokens = drawn_sizes(text, rng.random(count), 1, "workload.text")
        items: dict[str, Items] = {}
        if images:
            counts = drawn_sizes(images["count"], rng.random(count), 0, "workload.images.count")
            widths, heights = _sides(images, int(counts.sum()), rng, "workload.images")
            items["image"] = image_items(counts, widths, heights, rules, MAX_IMAGE_TOKENS)
        if video:
            seconds = drawn_sizes(video["seconds"], rng.random(count), 1, "workload.video.seconds")
            widths, heights = _sides(video, count, rng, "workload.video")
            items["video"] = video_items(seconds.astype(np.float64), widths, heights, rules, *FRAME_TOKENS)
        shapes = shapes_of(text_tokens, items, np.arange(first_id, first_id + count))
        if rules.context_tokens is None:
            return shapes
        room = rules.context_tokens - (shapes.llm_tokens - text_tokens)
        return replace(shapes, text_tokens=np.minimum(text_tokens, np.maximum(room, 1)))

    def _parse(self) -> tuple[Marginal, dict[str, Marginal], dict[str, Marginal]]:
        images = _marginals(_Pictures, self.images, "workload.images")
        video = _marginals(_Video, self.video, "workload.video")
        return parse_marginal(self.text, "workload.text"), images, video


def _marginals(kind: type[_Pictures | _Video], given: object, where: str) -> dict[str, Marginal]:
    values = {} if given is None else asdict(parse(kind, given, where))
    return {name: parse_marginal(value, f"{where}.{name}") for name, value in values.items()}


def _sides(marginals: Mapping[str, Marginal], total: int, rng: Generator, where: str) -> tuple[FloatArray, FloatArray]:
    """Widths and heights in whole pixels ``[total]`` each."""
    side = drawn_sizes(marginals["side"], rng.random(total), 1, f"{where}.side").astype(np.float64)
    root = np.sqrt(np.clip(marginals["aspect"].ppf(rng.random(total)), 1 / MAX_ASPECT_RATIO, MAX_ASPECT_RATIO))
    return np.maximum(1.0, np.rint(side * root)), np.maximum(1.0, np.rint(side / root))
