"""Token counts against those of the processors that models are trained with, for 1,000 random sizes each."""

from __future__ import annotations

import numpy as np
import pytest

from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.specs.tokens import TileRules
from entrain_bench_workloads.tiles import best_grids, grid_tokens
from entrain_bench_workloads.tokens import audio_items, image_items, image_tokens, video_items
from support.specs import rules_of

pytest.importorskip("transformers")
NUM_SIZES = 1000
MAX_IMAGE_TOKENS = 16384


def sizes(least: int, most: int, seed: int = 0) -> tuple[FloatArray, FloatArray]:
    """Sides in pixels within a ratio of 199, evenly spread over their logarithms."""
    rng = np.random.default_rng(seed)
    sides = np.rint(np.exp(rng.uniform(np.log(least), np.log(most), (20 * NUM_SIZES, 2))))
    sides = sides[sides.max(axis=1) < 199 * sides.min(axis=1)][:NUM_SIZES]
    assert len(sides) == NUM_SIZES
    return sides[:, 0].copy(), sides[:, 1].copy()


def smart_resize_tokens(widths: FloatArray, heights: FloatArray, least: int, most: int) -> IntArray:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    area = 28**2
    pairs = zip(widths.astype(int).tolist(), heights.astype(int).tolist(), strict=True)
    found = [smart_resize(height, width, 28, least * area, most * area) for width, height in pairs]
    return np.array([height * width // area for height, width in found])


def test_qwen25vl_images() -> None:
    rules = rules_of("qwen25vl")
    widths, heights = sizes(15, 12000)
    theirs = smart_resize_tokens(widths, heights, rules.min_image_tokens, MAX_IMAGE_TOKENS)
    ours = image_items(np.ones(NUM_SIZES, np.int64), widths, heights, rules, MAX_IMAGE_TOKENS)
    # Of thin images theirs exceeds its own limit.
    np.testing.assert_array_equal(ours.llm_tokens, np.minimum(theirs, ours.llm_tokens.max()))
    np.testing.assert_array_equal(ours.encoder_tokens, 4 * ours.llm_tokens)
    assert len(np.unique(theirs)) > 500


def test_qwen25vl_frames() -> None:
    rules = rules_of("qwen25vl")
    widths, heights = sizes(64, 4000, seed=1)
    seconds = np.random.default_rng(1).uniform(0.5, 20, NUM_SIZES)
    ours = video_items(seconds, widths, heights, rules, 128, 768)
    theirs = smart_resize_tokens(widths, heights, 128, 768)
    frames = np.maximum(1, np.round(seconds * 2, 3) // 2).astype(np.int64)
    np.testing.assert_array_equal(ours.llm_tokens, np.repeat(theirs, frames))
    np.testing.assert_array_equal(image_tokens(widths, heights, rules, 128, 768), theirs)


def test_llava_onevision_tiles() -> None:
    from transformers import LlavaOnevisionImageProcessorPil, LlavaOnevisionProcessor

    rules = rules_of("llavaov").tiles
    assert isinstance(rules, TileRules)
    # Without a tokenizer there is none; its counts are functions of these.
    processor = object.__new__(LlavaOnevisionProcessor)
    processor.image_processor = LlavaOnevisionImageProcessorPil()
    processor.num_image_tokens, processor.vision_aspect_ratio = rules.encoder_side**2, "anyres_max_9"
    widths, heights = (sides.astype(np.int64) for sides in sizes(20, 6000))
    pairs = zip(widths.tolist(), heights.tolist(), strict=True)
    theirs = [processor._get_number_of_features(height, width, rules.pixels, rules.pixels) for width, height in pairs]
    columns, rows = best_grids(widths, heights, rules)
    # Theirs hands the thumbnail to the LLM as well; DFLOP's, whose counts these are, does not.
    ours = grid_tokens(widths, heights, columns, rows, rules) + rules.llm_side**2
    np.testing.assert_array_equal(ours, theirs)


def test_internvl_tiles() -> None:
    from transformers import GotOcr2ImageProcessorPil

    rules = rules_of("internvl_dynamic")
    # InternVL's models name this one as their processor.
    processor = GotOcr2ImageProcessorPil(
        size={"height": 448, "width": 448}, min_patches=1, max_patches=12, crop_to_patches=True
    )
    widths, heights = sizes(20, 6000)
    pairs = zip(widths.astype(int).tolist(), heights.astype(int).tolist(), strict=True)
    theirs = [processor.get_number_of_image_patches(height, width) for width, height in pairs]
    ours = image_items(np.ones(NUM_SIZES, np.int64), widths, heights, rules, MAX_IMAGE_TOKENS)
    np.testing.assert_array_equal(ours.counts, theirs)
    assert set(ours.llm_tokens) == {256}
    assert set(ours.encoder_tokens) == {1024}
    assert len(set(theirs)) == 12
    several = image_items(np.array([NUM_SIZES]), widths, heights, rules, MAX_IMAGE_TOKENS)
    assert several.counts.tolist() == [sum(theirs)]


def test_whisper_s_log_mel_frames() -> None:
    from transformers import WhisperFeatureExtractor
    from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioEncoder

    rules, rate = rules_of("qwen25vl"), 16000
    extractor = WhisperFeatureExtractor()
    samples = np.random.default_rng(0).integers(rate // 100, 30 * rate, NUM_SIZES)
    frames = -(-samples // extractor.hop_length)
    for count, expected in zip(samples[:5].tolist(), frames[:5].tolist(), strict=True):
        found = extractor(np.zeros(count, np.float32), sampling_rate=rate, return_attention_mask=True)
        assert int(np.sum(found["attention_mask"])) == expected
    convolved, pooled = Qwen2AudioEncoder._get_feat_extract_output_lengths(None, frames)
    ours = audio_items(samples / rate, rules)
    np.testing.assert_array_equal(ours.counts, 1)
    np.testing.assert_array_equal(ours.encoder_tokens, convolved)
    # Qwen2-Audio leaves an odd last frame out, here it counts as a token.
    np.testing.assert_array_equal(ours.llm_tokens - pooled, convolved % 2)
