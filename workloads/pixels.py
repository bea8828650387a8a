"""Samples drawn as a camera or a web page gives them: pixels and seconds, which the model's rules turn into tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np

from entrain_bench.base.arrays import FloatArray
from entrain_bench.base.errors import UserError, require
from entrain_bench.specs.parse import check_mapping, parse
from entrain_bench.specs.shapes import Items, SampleShapes, shapes_of
from entrain_bench.specs.tokens import TokenRules

from .marginals import Marginal, parse_marginal
from .sample_blocks import BLOCK_SAMPLES, BlockSource, Generated
from .synthetic import drawn_sizes
from .tokens import MAX_ASPECT_RATIO, image_items, video_items

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
