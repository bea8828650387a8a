"""Pixels and waves become what the processors of published models make of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch.nn import functional

from entrain_bench.train.features import PatchRules, log_mel, write_patches, write_windows

QWEN = PatchRules.of(1176, 14, 2, "qwen25vl_vision", "model.modules.vision")


def photograph(width: int, height: int) -> Image.Image:
    """A picture without two equal places."""
    rng = np.random.default_rng(width * height)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 7, 3), dtype=np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


def patches(pixels: np.ndarray, rules: PatchRules) -> np.ndarray:
    width = 3 * rules.frames * rules.pixels**2
    out = np.empty((pixels.shape[1] * pixels.shape[2] // rules.pixels**2, width), np.float32)
    write_patches(pixels, rules, out)
    return out


@pytest.mark.parametrize(("width", "height"), [(84, 56), (97, 333), (640, 17), (30, 31)])
def test_patches_are_those_of_qwen2_vl_s_processor(width: int, height: int) -> None:
    processor = transformers.Qwen2VLImageProcessorPil(size={"shortest_edge": 4 * 28**2, "longest_edge": 16384 * 28**2})
    image = photograph(width, height)
    theirs = processor(images=[image], return_tensors="np")
    _, rows, columns = theirs["image_grid_thw"][0].tolist()
    pixels = np.asarray(image.resize((columns * 14, rows * 14), Image.Resampling.BICUBIC))[None]
    np.testing.assert_allclose(patches(pixels, QWEN), theirs["pixel_values"], rtol=0, atol=1e-6)


def test_patches_of_one_frame_are_what_siglip_s_convolution_sees() -> None:
    processor = transformers.SiglipImageProcessorPil(size={"height": 56, "width": 84}, resample=3)
    image = photograph(120, 90)
    theirs = torch.from_numpy(processor(images=[image], return_tensors="np")["pixel_values"])
    seen = functional.unfold(theirs, 14, stride=14)[0].T
    pixels = np.asarray(image.resize((84, 56), Image.Resampling.BICUBIC))[None]
    rules = PatchRules.of(588, 14, 1, "siglip", "model.modules.vision")
    np.testing.assert_allclose(patches(pixels, rules), seen.numpy(), rtol=0, atol=2e-6)


def test_windows_are_what_the_first_convolution_sees() -> None:
    wave = np.random.default_rng(0).normal(size=16000).astype(np.float32)
    out = np.empty((50, 2 * 3 * 8), np.float32)
    write_windows(wave, out)
    frames = torch.from_numpy(log_mel(wave, 100, 8))
    seen = functional.pad(frames.T, (1, 1)).unfold(1, 3, 1).permute(1, 2, 0).reshape(50, 48)
    np.testing.assert_array_equal(out, seen.numpy())


def test_a_sound_that_is_too_long_is_cut_and_a_short_one_goes_on_in_silence() -> None:
    wave = np.random.default_rng(1).normal(size=1000).astype(np.float32)
    longer = np.concatenate([wave, np.full(500, 9, np.float32)])
    filled = np.concatenate([wave[:960], np.zeros(640, np.float32)])
    np.testing.assert_array_equal(log_mel(wave, 6, 8), log_mel(longer, 6, 8))
    np.testing.assert_array_equal(log_mel(wave[:960], 10, 8), log_mel(filled, 10, 8))
    np.testing.assert_array_equal(log_mel(wave[:0], 10, 8), log_mel(filled[960:], 10, 8))
