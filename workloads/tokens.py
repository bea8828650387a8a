"""Pixels, seconds and characters to tokens: pure functions of a model's ``TokenRules``."""

from collections.abc import Sequence

import numpy as np

from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.specs.shapes import Items
from entrain_bench.specs.tokens import QWEN_VL_UTILS, AudioRules, TokenRules, VideoRules

from .budget import ask_items
from .processors import frame_rules, processed_images, tiled_images

# Beyond this ratio of its sides Qwen2.5-VL's image processor refuses an image.
MAX_ASPECT_RATIO = 200.0
# Traces hold seconds as float32; a thousandth of a token absorbs that error before rounding up or down.
_TOKEN_DECIMALS = 3


def image_grids(
    widths: FloatArray, heights: FloatArray, rules: TokenRules, min_tokens: float, max_tokens: float
) -> IntArray:
    """Rows and columns of LLM tokens ``[images, 2]`` of images with sides in pixels ``[images]``.

    Qwen2.5-VL's rule (arXiv:2502.13923; Hugging Face ``smart_resize``): each side goes to the nearest multiple of
    ``patch_pixels * merge_patches`` (halves to even). An image whose area is then above ``max_tokens`` is scaled down
    with its proportions kept and its sides rounded down; one below ``min_tokens`` is scaled up and rounded up. Where
    the published rule still exceeds ``max_tokens`` (very thin images), the long side is cut.
    """
    factor = rules.patch_pixels * rules.merge_patches
    sides = np.stack((heights, widths)).astype(np.float64)
    area = sides.prod(axis=0)
    nearest = np.maximum(1, np.rint(sides / factor))
    shrink = np.sqrt(area / (max_tokens * factor**2))
    grow = np.sqrt(min_tokens * factor**2 / area)
    smaller = np.maximum(1, np.floor(sides / shrink / factor))
    larger = np.ceil(sides * grow / factor)
    cells = nearest.prod(axis=0)
    units = np.where(cells > max_tokens, smaller, np.where(cells < min_tokens, larger, nearest))
    short = units.min(axis=0)
    long = np.argmax(units, axis=0)
    is_long = np.arange(2)[:, None] == long
    return np.asarray(np.where(is_long, np.minimum(units, max_tokens // short), short), np.int64).T


def image_items(
    counts: IntArray, widths: FloatArray, heights: FloatArray, rules: TokenRules, max_image_tokens: int
) -> Items:
    """Images as items: ``counts`` per sample ``[samples]``, sides in pixels ``[images]``.

    Models with tiles (``tiled_images``) and published processors (``processed_images``) have their own rules.
    """
    if rules.images is not None:
        return processed_images(counts, widths, heights, rules.images)
    if rules.tiles is not None:
        return tiled_images(counts, widths, heights, rules.tiles)
    limit = max_image_tokens if rules.max_image_tokens is None else min(max_image_tokens, rules.max_image_tokens)
    grids = image_grids(widths, heights, rules, rules.min_image_tokens, limit)
    llm = grids.prod(axis=1)
    return Items(counts, llm * rules.merge_patches**2, llm, grids * rules.merge_patches)


def video_items(
    seconds: FloatArray, widths: FloatArray, heights: FloatArray, rules: TokenRules, min_tokens: int, max_tokens: int
) -> Items:
    """Videos as items, one for each group of ``temporal_patch_frames`` frames.

    As many whole groups are sampled as the video holds at ``video_frames_per_s``, at least one; a group costs as much
    as one resized frame. Without ``rules.video`` there is no limit on a video's total. ``seconds`` ``[samples]`` are
    NaN for none, sides of frames in pixels ``[videos]``. Models with ``frames`` or tiles have frames of one size, each
    an item.
    """
    if rules.video is not None:
        return _processed_videos(seconds, widths, heights, rules, rules.video)
    present = ~np.isnan(seconds)
    frames = np.round(np.nan_to_num(seconds) * rules.video_frames_per_s, _TOKEN_DECIMALS)
    one_size = rules.frames or (rules.tiles and frame_rules(rules.tiles))
    most = one_size.max_frames if one_size else np.inf
    many = np.ceil(frames) if one_size else frames // rules.temporal_patch_frames
    groups = np.where(present, np.clip(many, 1, most), 0).astype(np.int64)
    ask_items(groups)
    if one_size:
        total = int(groups.sum())
        return Items(groups, np.full(total, one_size.encoder_tokens), np.full(total, one_size.llm_tokens))
    frame_grids = image_grids(widths, heights, rules, min_tokens, max_tokens)
    grids = np.repeat(frame_grids, groups[present], axis=0)
    llm = grids.prod(axis=1)
    return Items(groups, llm * rules.merge_patches**2, llm, grids * rules.merge_patches)


def _processed_videos(
    seconds: FloatArray, widths: FloatArray, heights: FloatArray, rules: TokenRules, video: VideoRules
) -> Items:
    """Videos as the processors of Qwen2.5-VL and Qwen3-VL (``shared``) count them, operation by operation.

    A file is taken to have at least as many frames as are sampled.
    """
    present = ~np.isnan(seconds)
    wanted = np.round(seconds[present] * rules.video_frames_per_s, _TOKEN_DECIMALS)
    group = rules.temporal_patch_frames
    if video.shared:
        frames = np.clip(np.floor(wanted), video.min_frames, video.max_frames)
    else:
        frames = np.clip(wanted, video.min_frames, video.max_frames // group * group) // group * group
    factor = rules.patch_pixels * rules.merge_patches
    least: FloatArray = np.full(len(frames), float(video.min_pixels))
    most: FloatArray = np.full(len(frames), float(video.max_pixels))
    if video.rule == QWEN_VL_UTILS:
        floor = int(video.min_pixels * 1.05)
        budget = video.max_tokens * factor**2
        if video.shared:
            most = np.maximum(np.minimum(budget, most // frames), floor) * frames
        else:
            most = np.maximum(np.minimum(most, int(budget * 0.9) * group // frames), floor)
    together = frames if video.shared else np.ones(len(frames))
    counted = np.rint(frames / group) * group if video.shared else together
    sides = np.stack((heights, widths)).astype(np.float64)
    if video.shared:
        small = sides.min(axis=0)
        sides = np.where(small < factor, np.floor(sides * (factor / small)), sides)
    nearest = np.rint(sides / factor) * factor
    pixels = counted * nearest.prod(axis=0)
    shrink = np.sqrt(together * sides.prod(axis=0) / most)
    grow = np.sqrt(least / (together * sides.prod(axis=0)))
    smaller = np.maximum(factor, np.floor(sides / shrink / factor) * factor)
    larger = np.ceil(sides * grow / factor) * factor
    resized = np.where(pixels > most, smaller, np.where(pixels < least, larger, nearest))
    grids = (resized // factor).astype(np.int64).T
    groups = np.zeros(len(seconds), np.int64)
    groups[present] = -(-frames // group)
    ask_items(groups)
    grids = np.repeat(grids, groups[present], axis=0)
    llm = grids.prod(axis=1)
    return Items(groups, llm * rules.merge_patches**2, llm, grids * rules.merge_patches)


def audio_items(seconds: FloatArray, rules: TokenRules) -> Items:
    """Audio of ``seconds`` ``[samples]`` (NaN: none) as items of ``audio_segment_s``; the last may be shorter.

    Encoder tokens are ``audio_frames_per_s`` times the length, rounded up; each item's LLM tokens are its encoder
    tokens divided by ``audio_merge_frames``, rounded up. A model with ``audio`` rules counts by those.
    """
    if rules.audio is not None:
        return _stepwise_audio(seconds, rules.audio_segment_s, rules.audio)
    tokens = np.ceil(np.round(np.nan_to_num(seconds) * rules.audio_frames_per_s, _TOKEN_DECIMALS)).astype(np.int64)
    tokens = np.where(np.isnan(seconds), 0, np.maximum(1, tokens))
    full = max(1, int(round(rules.audio_segment_s * rules.audio_frames_per_s, _TOKEN_DECIMALS)))
    counts = -(-tokens // full)
    ask_items(counts)
    encoder = np.full(counts.sum(), full, np.int64)
    present = counts > 0
    encoder[np.cumsum(counts[present]) - 1] = (tokens - (counts - 1) * full)[present]
    return Items(counts, encoder, -(-encoder // rules.audio_merge_frames))


def _stepwise_audio(seconds: FloatArray, segment_s: float, rules: AudioRules) -> Items:
    """Audio of ``seconds`` ``[samples]`` (NaN: none) as segments whose tokens follow from spectrogram frames."""
    heard = np.minimum(seconds, rules.heard_s) if rules.heard_s else seconds
    length = np.round(np.nan_to_num(heard), 6)
    counts = np.where(np.isnan(seconds), 0, np.maximum(1, np.ceil(np.round(length / segment_s, 6)))).astype(np.int64)
    ask_items(counts)
    present = counts > 0
    parts = np.full(int(counts.sum()), segment_s)
    parts[np.cumsum(counts[present]) - 1] = (length - (counts - 1) * segment_s)[present]
    own_frames, full = (_frames(seconds, rules) for seconds in (parts, np.full(len(parts), segment_s)))
    encoder = _stepped(full if rules.pads_encoder else own_frames, rules.encoder_steps)
    heard = _stepped(full if rules.pads_llm else own_frames, rules.encoder_steps)
    return Items(counts, encoder, _stepped(heard, rules.llm_steps))


def _frames(seconds: FloatArray, rules: AudioRules) -> IntArray:
    """Spectrogram frames of audio, at least one."""
    heard = np.round((seconds - rules.window_s) * rules.frames_per_s, _TOKEN_DECIMALS)
    return np.asarray(np.maximum(1, np.floor(heard) + 1 if rules.window_s else np.ceil(heard)), np.int64)


def _stepped(lengths: IntArray, steps: Sequence[Sequence[int]]) -> IntArray:
    """Lengths after convolutions ``[kernel, stride, padding]``, at least one."""
    for kernel, stride, padding in steps:
        lengths = np.maximum(1, (lengths + 2 * padding - kernel) // stride + 1)
    return lengths


# Characters of Chinese, Japanese or Korean that a token holds: Qwen's documentation says 1.5 to 1.8 of Chinese (2025).
CJK_PER_TOKEN = 1.65


def text_tokens(chars: FloatArray, rules: TokenRules, cjk: FloatArray | None = None) -> IntArray:
    """Text tokens of the given numbers of characters ``[samples]``, rounded up: none only for no character.

    ``cjk`` of them are Chinese, Japanese or Korean. docs/workloads.md has the error by language.
    """
    if cjk is not None:
        return np.ceil((chars - cjk) / rules.text_chars_per_token + cjk / CJK_PER_TOKEN).astype(np.int64)
    return np.ceil(chars / rules.text_chars_per_token).astype(np.int64)
