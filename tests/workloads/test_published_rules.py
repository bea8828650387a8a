"""Image, video and audio rules against the processors of transformers that they restate, for 200 random sizes each."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch as patched

import numpy as np
import pytest

from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.base.errors import UserError
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.shapes import Items
from entrain_bench.specs.tokens import (
    AnyResolution,
    AudioRules,
    FixedSize,
    FrameRules,
    ImageRules,
    LongestEdge,
    NativeSize,
    NearestGrid,
    PaddedGrid,
    Resampled,
    TileRules,
    TokenRules,
    VideoRules,
)
from entrain_bench_workloads.processors import best_grids, grid_tokens, processed_images
from entrain_bench_workloads.tokens import audio_items, image_items, video_items
from support.specs import load, rules_of

transformers = pytest.importorskip("transformers")
NUM_SIZES = 200
MAX_IMAGE_TOKENS = 16384


def sizes(least: int = 20, most: int = 6000) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    widths = np.rint(np.exp(rng.uniform(np.log(least), np.log(most), NUM_SIZES)))
    ratios = np.exp(rng.uniform(-1.5, 1.5, NUM_SIZES))
    return widths, np.maximum(8.0, np.rint(widths * ratios))


def pairs(widths: np.ndarray, heights: np.ndarray) -> Iterator[tuple[int, int]]:
    """Height and width, as processors take them."""
    return zip(heights.astype(int).tolist(), widths.astype(int).tolist(), strict=True)


def per_image(rules: ImageRules, widths: np.ndarray, heights: np.ndarray) -> Items:
    """Every image in a sample of its own."""
    return processed_images(np.ones(len(widths), np.int64), widths, heights, rules)


def totals(items: Items) -> np.ndarray:
    """LLM tokens of each sample."""
    owner = np.repeat(np.arange(len(items.counts)), items.counts)
    return np.bincount(owner, weights=items.llm_tokens, minlength=len(items.counts)).astype(np.int64)


def without_tokenizer(cls: type, **attributes: Any) -> Any:
    """A processor whose counts need no tokenizer."""
    processor = object.__new__(cls)
    for name, value in attributes.items():
        setattr(processor, name, value)
    return processor


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
    assert len(np.unique(theirs)) > 100


def test_qwen25vl_frames() -> None:
    rules = rules_of("qwen25vl")
    widths, heights = sizes(64, 4000)
    seconds = np.random.default_rng(1).uniform(0.5, 20, NUM_SIZES)
    ours = video_items(seconds, widths, heights, rules, 128, 768)
    theirs = smart_resize_tokens(widths, heights, 128, 768)
    frames = np.maximum(1, np.round(seconds * 2, 3) // 2).astype(np.int64)
    np.testing.assert_array_equal(ours.llm_tokens, np.repeat(theirs, frames))


@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize(
    ("name", "patch", "video"),
    [
        ("Qwen2VLVideoProcessor", 14, VideoRules(100_352, 602_112, 128_000)),
        ("Qwen3VLVideoProcessor", 16, VideoRules(4096, 25_165_824, 768, shared=True)),
    ],
)
def test_qwen_videos(name: str, patch: int, video: VideoRules, capped: bool) -> None:
    processor = getattr(transformers, name)(
        size={"shortest_edge": video.min_pixels, "longest_edge": video.max_pixels}, fps=2
    )
    widths, heights = (sides[:60] for sides in sizes(64, 2000))
    frames = np.random.default_rng(1).integers(60, 30 * 900, 60)
    frames[:10] = np.arange(60, 130, 7)
    rules = rules_with(patch_pixels=patch, video=replace(video, rule="qwen_vl_utils" if capped else "transformers"))
    ours = video_items(frames / 30, widths, heights, rules, 128, 768)
    offsets = np.cumsum(ours.counts)[:-1]
    totals = [int(part.sum()) for part in np.split(ours.llm_tokens, offsets)]
    theirs = []
    for total, wide, high in zip(frames.tolist(), *(map(int, sides) for sides in (widths, heights)), strict=True):
        metadata = transformers.video_utils.VideoMetadata(total_num_frames=total, fps=30.0, duration=total / 30)
        sampled = len(processor.sample_frames(metadata, fps=2))
        clip = SimpleNamespace(shape=(1, sampled, 3, high, wide))
        size = transformers.image_utils.SizeDict(shortest_edge=video.min_pixels, longest_edge=video.max_pixels)
        # The size that the processor asks its base class for.
        with patched.object(type(processor).__mro__[1], "resize", lambda _, size, **__: size):
            made = processor.resize(clip, size, None, 2 * patch, 2, cap_pixels_per_frame=capped)
        theirs.append(-(-sampled // 2) * (made.height // (2 * patch)) * (made.width // (2 * patch)))
    assert totals == theirs
    assert len(set(theirs)) > 30


def test_several_images_share_the_tiles_of_internvl_s_trainer() -> None:
    images = NearestGrid(448, 12, 1025, 256, divided=True)
    wide = np.full(7, 4000.0)
    ours = image_items(np.array([6, 1]), wide, wide / 4, rules_with(images=images), MAX_IMAGE_TOKENS)
    # Two tiles and an overview each; one image has four and an overview.
    assert ours.counts.tolist() == [18, 5]
    assert ours.llm_tokens[:18].sum() == 6 * (3 * 256 + 2) == 4620


def test_qwen2_audio_is_cut_off() -> None:
    seconds = np.array([10.0, 30.0, 60.0, 600.0, np.nan])
    ours = audio_items(seconds, rules_with(audio=replace(QWEN2_AUDIO, heard_s=30.0)))
    assert ours.llm_tokens.tolist() == [250, 750, 750, 750]
    assert ours.counts.tolist() == [1, 1, 1, 1, 0]


GRIDS = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))


def test_llava_next() -> None:
    pinpoints = [[336 * rows, 336 * columns] for rows, columns in GRIDS]
    processor = without_tokenizer(
        transformers.LlavaNextProcessor,
        image_processor=transformers.LlavaNextImageProcessorPil(image_grid_pinpoints=pinpoints),
        patch_size=14,
        num_additional_image_tokens=0,
    )
    widths, heights = sizes()
    theirs = [processor._get_number_of_features(high, wide, 336, 336) for high, wide in pairs(widths, heights)]
    ours = per_image(AnyResolution(336, 24, 577, 576, GRIDS), widths, heights)
    np.testing.assert_array_equal(totals(ours), theirs)
    assert set(ours.encoder_tokens) == {577}
    assert set(ours.counts) == {3, 4, 5}


def test_llava_onevision() -> None:
    grids = tuple((row, column) for row in range(1, 7) for column in range(1, 7))
    processor = without_tokenizer(
        transformers.LlavaOnevisionProcessor,
        image_processor=transformers.LlavaOnevisionImageProcessorPil(),
        num_image_tokens=729,
        vision_aspect_ratio="anyres_max_9",
    )
    assert [[384 * row, 384 * column] for row, column in grids] == processor.image_processor.image_grid_pinpoints
    widths, heights = sizes()
    theirs = [processor._get_number_of_features(high, wide, 384, 384) for high, wide in pairs(widths, heights)]
    rules = AnyResolution(384, 27, 729, 729, grids, max_tiles=9, single_only=True)
    np.testing.assert_array_equal(totals(per_image(rules, widths, heights)), theirs)
    tile_rules = rules_of("llavaov").tiles
    assert isinstance(tile_rules, TileRules)
    sides = widths.astype(np.int64), heights.astype(np.int64)
    # Theirs hands the thumbnail to the LLM as well; DFLOP's, whose counts these are, does not.
    counts = grid_tokens(*sides, *best_grids(*sides, tile_rules), tile_rules)
    np.testing.assert_array_equal(counts + tile_rules.llm_side**2, theirs)
    several = processed_images(np.array([2, 0, 1]), widths[:3], heights[:3], rules)
    assert several.counts[:2].tolist() == [2, 0]
    assert totals(several).tolist() == [2 * 730, 0, theirs[2]]


def test_internvl() -> None:
    processor = transformers.GotOcr2ImageProcessorPil(
        size={"height": 448, "width": 448}, min_patches=1, max_patches=12, crop_to_patches=True
    )
    widths, heights = sizes()
    tiles = np.array([processor.get_number_of_image_patches(*size) for size in pairs(widths, heights)])
    ours = per_image(NearestGrid(448, 12, 1025, 256), widths, heights)
    np.testing.assert_array_equal(ours.counts, tiles)
    # A token before the image and one after it.
    np.testing.assert_array_equal(totals(ours), 256 * tiles + 2)
    dynamic = image_items(np.ones(NUM_SIZES, np.int64), widths, heights, rules_of("internvl_dynamic"), MAX_IMAGE_TOKENS)
    np.testing.assert_array_equal(dynamic.counts, tiles)
    assert set(dynamic.llm_tokens) == {256}
    assert set(dynamic.encoder_tokens) == {1024}


@pytest.mark.parametrize("edge", [364, 4 * 364, 12 * 364])
def test_idefics3(edge: int) -> None:
    processor = transformers.Idefics3ImageProcessorPil(
        size={"longest_edge": edge}, max_image_size={"longest_edge": 364}, do_image_splitting=True
    )
    widths, heights = sizes()
    found = [processor.get_number_of_image_patches(*size) for size in pairs(widths, heights)]
    theirs = [172 + rows * (171 * columns + 1) for _, rows, columns in found]
    ours = per_image(LongestEdge(364, edge, 676, 169), widths, heights)
    np.testing.assert_array_equal(totals(ours), theirs)
    np.testing.assert_array_equal(ours.counts, [max(1, tiles) for tiles, _, _ in found])


def test_idefics2() -> None:
    from transformers.models.idefics2.image_processing_pil_idefics2 import get_resize_output_image_size

    limits = transformers.image_utils.SizeDict(shortest_edge=378, longest_edge=980)
    widths, heights = sizes()
    sides = [get_resize_output_image_size(np.empty((0, high, wide)), limits) for high, wide in pairs(widths, heights)]
    ours = per_image(Resampled(14, 378, 980, 64), widths, heights)
    np.testing.assert_array_equal(ours.encoder_tokens, [(high // 14) * (wide // 14) for high, wide in sides])
    assert set(ours.llm_tokens) == {64 + 2}
    quarters = per_image(Resampled(14, 378, 980, 64, quarters=True), widths, heights)
    assert set(quarters.counts) == {5}
    assert set(totals(quarters)) == {5 * 64 + 6}
    assert transformers.Idefics2ImageProcessorPil().size["longest_edge"] == 980


@pytest.mark.parametrize(("patch", "merge", "edge"), [(16, 1, 1024), (14, 2, 1540)])
def test_pixtral(patch: int, merge: int, edge: int) -> None:
    processor = without_tokenizer(
        transformers.PixtralProcessor,
        image_processor=transformers.PixtralImageProcessorPil(size={"longest_edge": edge}),
        patch_size=patch,
        spatial_merge_size=merge,
    )
    processor._merge_kwargs = lambda **_: {"images_kwargs": {}}
    widths, heights = sizes()
    theirs = processor._get_num_multimodal_tokens(image_sizes=[*pairs(widths, heights)])["num_image_tokens"]
    ours = per_image(NativeSize(patch * merge, edge, merge), widths, heights)
    np.testing.assert_array_equal(ours.llm_tokens, theirs)
    # A token for each square, and one at the end of each row.
    assert (ours.encoder_tokens % merge**2 == 0).all()
    assert (ours.encoder_tokens // merge**2 < ours.llm_tokens).all()


@pytest.mark.wide
def test_phi4_multimodal() -> None:
    pytest.importorskip("torchvision")
    torch = pytest.importorskip("torch")
    processor = transformers.Phi4MultimodalImageProcessor()
    widths, heights = sizes(60, 3000)
    heights = np.clip(heights, 60, 3000)
    theirs, tiles = [], []
    # A processor decides by sizes alone; it is asked for its mask, which takes no pixels.
    processor.rescale_and_normalize = lambda image, *_: image
    for high, wide in [*pairs(widths, heights)]:
        found = processor(torch.zeros(3, high, wide, dtype=torch.uint8), return_tensors="pt")
        theirs.append(int(found["num_img_tokens"][0]))
        tiles.append(found["image_pixel_values"].shape[1])
    ours = per_image(PaddedGrid(448, 14, 36), widths, heights)
    np.testing.assert_array_equal(totals(ours), theirs)
    np.testing.assert_array_equal(ours.counts, tiles)


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


QWEN2_AUDIO = AudioRules(100, ((3, 1, 1), (3, 2, 1)), ((2, 2, 0),), pads_encoder=True)
PHI4_AUDIO = AudioRules(100, ((1, 8, 0),), (), window_s=0.025)


def rules_with(**changes: Any) -> TokenRules:
    return replace(rules_of("qwen25vl"), **changes)


def test_qwen2_audio() -> None:
    from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioEncoder

    samples = np.random.default_rng(0).integers(2000, 30 * 16000, NUM_SIZES)
    _, theirs = Qwen2AudioEncoder._get_feat_extract_output_lengths(None, -(-samples // 160))
    ours = audio_items(samples / 16000, rules_with(audio=QWEN2_AUDIO))
    np.testing.assert_array_equal(ours.llm_tokens, theirs)
    # Whisper's encoder works on 30 seconds, whatever is silent.
    assert set(ours.encoder_tokens) == {1500}


@pytest.mark.wide
def test_phi4_audio() -> None:
    torch = pytest.importorskip("torch")
    processor = transformers.Phi4MultimodalFeatureExtractor()
    samples = np.random.default_rng(0).integers(2000, 40 * 16000, NUM_SIZES)
    frames = (torch.tensor(samples) - processor.win_length) // processor.hop_length + 1
    theirs = processor._compute_audio_embed_size(frames).numpy()
    ours = audio_items(samples / 16000, rules_with(audio=PHI4_AUDIO, audio_segment_s=40.0))
    np.testing.assert_array_equal(ours.llm_tokens, theirs)
    np.testing.assert_array_equal(ours.encoder_tokens, theirs)


def test_audio_of_several_segments_and_of_none() -> None:
    seconds = np.array([np.nan, 0.0, 30.0, 30.001, 75.0])
    ours = audio_items(seconds, rules_with(audio=QWEN2_AUDIO))
    assert ours.counts.tolist() == [0, 1, 1, 2, 3]
    assert ours.llm_tokens.tolist() == [1, 750, 750, 1, 750, 750, 375]
    padded = AudioRules(100, ((3, 1, 1), (3, 2, 1)), ((1, 4, 0),), pads_encoder=True, pads_llm=True)
    assert set(audio_items(seconds, rules_with(audio=padded)).llm_tokens) == {375}


def test_a_models_own_limit_of_image_tokens_binds() -> None:
    widths, heights = sizes(500)
    free, bound = (rules_with(max_image_tokens=limit) for limit in (None, 1280.0))
    counts = np.ones(NUM_SIZES, np.int64)
    assert image_items(counts, widths, heights, free, 16384).llm_tokens.max() > 1280
    limited = image_items(counts, widths, heights, bound, 16384)
    assert 1200 < limited.llm_tokens.max() <= 1280
    assert limited.llm_tokens.dtype == np.int64
    lower = image_items(counts, widths, heights, bound, 100)
    assert lower.llm_tokens.max() <= 100


AUDIO = {"frames_per_s": 100, "encoder_steps": [[3, 2, 1]], "llm_steps": [[2, 2, 0]]}
ONE_GRID = {"kind": "any_resolution", "pixels": 336, "side": 24, "encoder_tokens": 1, "overview_tokens": 1}


def test_rules_come_from_a_model() -> None:
    config = load("model", "qwen25vl_llama3_1b")
    config["tokens"] |= {
        "images": {"kind": "fixed_size", "encoder_tokens": 4096, "llm_tokens": 256},
        "frames": {"encoder_tokens": 729, "llm_tokens": 196, "max_frames": 32},
        "audio": AUDIO,
        "max_image_tokens": 1280,
    }
    rules = ModelSpec.from_config(config).tokens
    assert rules.images == FixedSize(4096, 256)
    assert rules.frames == FrameRules(729, 196, 32)
    assert rules.audio == AudioRules(100.0, ((3, 2, 1),), ((2, 2, 0),))
    widths, heights = sizes()
    ours = image_items(np.array([NUM_SIZES]), widths, heights, rules, 16384)
    assert ours.counts.tolist() == [NUM_SIZES]
    assert set(ours.llm_tokens) == {256}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"images": {"kind": "fixed"}}, "images.kind"),
        ({"images": {"kind": "fixed_size", "encoder_tokens": 0, "llm_tokens": 1}}, "images.encoder_tokens=0"),
        ({"images": ONE_GRID | {"grids": [[0, 1]]}}, "images.grids"),
        ({"audio": AUDIO | {"frames_per_s": 0.0}}, "audio.frames_per_s"),
        ({"audio": AUDIO | {"encoder_steps": [[3, 0, 1]]}}, "audio.encoder_steps"),
    ],
)
def test_wrong_rules_are_named(given: dict[str, Any], named: str) -> None:
    config = load("model", "qwen25vl_llama3_1b")
    config["tokens"] |= given
    with pytest.raises(UserError, match=named):
        ModelSpec.from_config(config)
