"""Token rules from the configurations of processors (``preprocessor_config.json`` and ``processor_config.json``)."""

import math
import re
from collections.abc import Mapping
from typing import Any

from entrain_bench.base.errors import UserError, require
from entrain_bench.config.hub.fields import Fields

# Rules that a model's processor does not state: Qwen's and Whisper's, as in experiments/model/tokens/qwen25vl.yaml.
USUAL: Mapping[str, Any] = {
    "patch_pixels": 14,
    "merge_patches": 1,
    "min_image_tokens": 1,
    "temporal_patch_frames": 1,
    "video_frames_per_s": 1.0,
    "audio_frames_per_s": 50.0,
    "audio_merge_frames": 2,
    "audio_segment_s": 30.0,
    "text_chars_per_token": 4.0,
}
# Patches on a side of an image at most: positions of MoonViT (transformers, Kimi_K25ImageProcessor).
MAX_MOON_SIDE = 512
# Frames of a video at most, one a second, as in experiments/model/tokens/llavaov.yaml.
MAX_FRAMES = 32


# Values of the published preprocessor_config.json of a type, for folders without that file: limits of an image's area
# in pixels (model cards and files of 2026-11), and the most patches of MoonViT.
QWEN3 = {"patch_size": 16, "merge_size": 2, "min_pixels": 65_536, "max_pixels": 16_777_216}
GLM = {"patch_size": 14, "merge_size": 2, "min_pixels": 12_544, "max_pixels": 9_633_792}
ERNIE = {"patch_size": 14, "merge_size": 2, "min_pixels": 3_136, "max_pixels": 4_816_896}
PUBLISHED: Mapping[str, Mapping[str, int]] = {
    "qwen3_vl": QWEN3,
    "qwen3_vl_moe": QWEN3,
    "qwen3_5": QWEN3,
    "qwen3_5_moe": QWEN3,
    "qwen3_omni_moe": QWEN3 | {"min_pixels": 3_136, "max_pixels": 12_845_056},
    "glm4v": GLM,
    "glm4v_moe": GLM,
    "ernie4_5_moe_vl": ERNIE,
    "ernie4_5_vl_moe": ERNIE,
    "kimi_vl": {"patch_size": 14, "max_patches": 4_096},
    "kimi_k25": {"patch_size": 14, "max_patches": 16_384},
}


def qwen_images(processor: Fields, vision: Fields, frames: int = 0, limited_frames: int = 1) -> dict[str, Any]:
    """Patches of an image's own size, between two limits (Qwen2-VL and its successors).

    ``limited_frames``: how many times an image's area counts against the limits; GLM-4V's processor counts it as a
    video of ``temporal_patch_size`` frames.
    """
    patch = vision.square("patch_size")
    merge = vision.integer("spatial_merge_size")
    for name, own in (("patch_size", patch), ("merge_size", merge)):
        stated = processor.square(name)
        require(stated == own, name, stated, f"{own}, as config.json has it")
    least, most = (
        _pixels(processor, *names) / (limited_frames * (patch * merge) ** 2)
        for names in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
    )
    return {
        "patch_pixels": patch,
        "merge_patches": merge,
        "min_image_tokens": max(1.0, least),
        "max_image_tokens": most,
        "temporal_patch_frames": frames or vision.integer("temporal_patch_size"),
        "video_frames_per_s": 2.0,
    }


def qwen_video(processor: Fields, kind: str) -> dict[str, Any]:
    """Limits of frames of Qwen's video processors, whose own defaults files replace."""
    if not kind.startswith(("qwen2", "qwen3")):
        return {}
    shared = not kind.startswith("qwen2")
    given = processor.part("video_processor") if processor.get("video_processor") else Fields({}, "video_processor")
    # Published files of Qwen3-VL (2025-10); defaults of transformers 5 otherwise.
    limits = (4096, 25_165_824) if shared else (128 * 28**2, 768 * 28**2)
    size = given.get("size") or {}
    names = (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
    stated = [next((v for v in (given.get(a), size.get(a), size.get(b)) if v is not None), None) for a, b in names]
    own = {name: given.get(name) for name in ("min_frames", "max_frames") if given.get(name) is not None}
    pixels = {
        name: limit if value is None else value for (name, _), value, limit in zip(names, stated, limits, strict=True)
    }
    return {"video": {**pixels, **own, "shared": shared, "max_tokens": 768 if shared else 128_000}}


def moon_images(processor: Fields, vision: Fields) -> dict[str, Any]:
    """Patches of an image's own size, up to a limit (MoonViT)."""
    patch = vision.square("patch_size")
    stated = processor.square("patch_size")
    require(stated == patch, "patch_size", stated, f"{patch}, as config.json has it")
    merge = vision.integers("merge_kernel_size")
    square = len({*merge}) == 1
    require(square, vision.named("merge_kernel_size"), merge, "two equal sides")
    limit = "in_token_limit" if processor.get("in_token_limit") else "max_patches"
    rules = {"pixels": patch, "max_patches": processor.integer(limit), "max_side": MAX_MOON_SIDE, "merge": merge[0]}
    return {"images": {"kind": "padded_size", **rules}, "patch_pixels": patch, "merge_patches": merge[0]}


def _pixels(processor: Fields, name: str, edge: str) -> int:
    """A limit of an image's area: ``size`` states it under either name, and a field of the whole file replaces it."""
    if processor.get(name) is not None or not processor.get("size"):
        return processor.integer(name)
    size = processor.part("size")
    return size.integer(name if size.get(name) is not None else edge)


def tile_side(processor: Fields) -> int:
    """Side of the square that a processor resizes or crops images to, in pixels."""
    crop = processor.get("crop_size") if processor.get("do_center_crop") else None
    name = "crop_size" if crop else "size"
    if isinstance(processor.get(name), int):
        return processor.integer(name)
    size = processor.part(name)
    if size.get("shortest_edge") is not None:
        return size.integer("shortest_edge")
    height = size.integer("height")
    width = size.integer("width")
    require(height == width, f"{size.path}width", width, f"height={height}: only square sizes are supported")
    return height


def keeps_all(config: Fields) -> bool:
    """Whether all of the encoder's tokens reach the LLM, the class token included."""
    return config.choice("vision_feature_select_strategy", ("default", "full")) == "full"


def fixed(encoder_tokens: int, llm_tokens: int) -> dict[str, Any]:
    """Images of one size."""
    return {"images": {"kind": "fixed_size", "encoder_tokens": encoder_tokens, "llm_tokens": llm_tokens}}


def any_resolution(processor: Fields, config: Fields, vision: Fields, has_class_token: bool) -> dict[str, Any]:
    """Grids of tiles as LLaVA-NeXT and LLaVA-OneVision have them."""
    pixels = tile_side(processor)
    patch = vision.square("patch_size")
    side = pixels // patch
    if not keeps_all(config) and not has_class_token:
        raise UserError("vision_feature_select_strategy=default: would drop a patch; must be full for this encoder")
    rules: dict[str, Any] = {
        "kind": "any_resolution",
        "pixels": pixels,
        "side": side,
        "encoder_tokens": side**2 + has_class_token,
        "overview_tokens": side**2 + (has_class_token and keeps_all(config)),
        "grids": _grids(processor if processor.get("image_grid_pinpoints") else config, pixels),
    }
    ratio = config.get("vision_aspect_ratio")
    if not ratio:
        return {"images": rules, "patch_pixels": patch}
    limit = re.fullmatch(r"anyres_max_(\d+)", str(ratio))
    if limit is None:
        raise UserError(f"vision_aspect_ratio={ratio}: must be anyres_max_N")
    rules |= {"max_tiles": int(limit[1]), "single_only": True}
    frames = {"encoder_tokens": side**2, "llm_tokens": math.ceil(side / 2) ** 2, "max_frames": MAX_FRAMES}
    return {"images": rules, "frames": frames, "patch_pixels": patch}


def _grids(fields: Fields, pixels: int) -> list[list[int]]:
    stated = fields.needed("image_grid_pinpoints")
    fits = isinstance(stated, list) and all(
        isinstance(size, list) and len(size) == 2 and all(isinstance(one, int) and one >= pixels for one in size)
        for size in stated
    )
    require(fits, "image_grid_pinpoints", stated, f"pairs of sides of at least {pixels} pixels")
    return [[height // pixels, width // pixels] for height, width in stated]


def nearest_grid(
    max_tiles: int, min_tiles: int, pixels: int, vision: Fields, ratio: float, has_overview: bool, divided: bool = False
) -> dict[str, Any]:
    """InternVL's dynamic tiling; ``ratio``: LLM tokens on a side of a tile relative to its patches."""
    require(min_tiles == 1, "min_patches", min_tiles, "1")
    require(has_overview, "use_thumbnail", has_overview, "true")
    patch = vision.square("patch_size")
    side = pixels // patch
    tile = {"encoder_tokens": side**2 + 1, "llm_tokens": int(side * ratio) ** 2}
    images = {"kind": "nearest_grid", "pixels": pixels, "max_tiles": max_tiles, "divided": divided, **tile}
    return {"images": images, "frames": {**tile, "max_frames": MAX_FRAMES}, "patch_pixels": patch}


def longest_edge(processor: Fields, vision: Fields, scale: int) -> dict[str, Any]:
    """Tiles and an overview as Idefics3 and SmolVLM have them; ``scale``: patches on a side of an LLM token."""
    pixels = processor.part("max_image_size").integer("longest_edge")
    patch = vision.square("patch_size")
    side = pixels // patch
    llm_tokens = (side // scale) ** 2
    if processor.get("do_image_splitting") is False:
        # With a marker on each side, and one that tells the overview.
        return fixed(side**2, llm_tokens + 3)
    longest = processor.part("size").integer("longest_edge")
    require(longest % pixels == 0, "size.longest_edge", longest, f"a multiple of max_image_size.longest_edge={pixels}")
    rules = {"pixels": pixels, "longest_edge": longest, "encoder_tokens": side**2, "llm_tokens": llm_tokens}
    return {"images": {"kind": "longest_edge", **rules}, "patch_pixels": patch}


def native_size(processor: Fields, vision: Fields, merge: int) -> dict[str, Any]:
    """Pixtral's images of their own size."""
    patch = vision.square("patch_size")
    size = processor.part("size")
    rules = {"pixels": patch * merge, "longest_edge": size.integer("longest_edge"), "merge": merge}
    return {"images": {"kind": "native_size", **rules}, "patch_pixels": patch, "merge_patches": merge}


def resampled(processor: Fields, vision: Fields, latents: int) -> dict[str, Any]:
    """Idefics2's images between two edges, of each of which a resampler makes ``latents`` tokens."""
    size = processor.part("size")
    patch = vision.square("patch_size")
    edges = {name: size.integer(name) for name in ("shortest_edge", "longest_edge")}
    rules = {"pixels": patch, **edges, "llm_tokens": latents, "quarters": processor.flag("do_image_splitting")}
    return {"images": {"kind": "resampled", **rules}, "patch_pixels": patch}


def padded_grid(processor: Fields, pixels: int, patch: int) -> dict[str, Any]:
    """Phi-4-multimodal's padded grids of tiles with sides of ``pixels``."""
    rules = {"pixels": pixels, "patch_pixels": patch, "max_tiles": processor.integer("dynamic_hd")}
    return {"images": {"kind": "padded_grid", **rules}, "patch_pixels": patch}


def omni_audio() -> dict[str, Any]:
    """13 tokens of each second, which three convolutions of stride 2 leave of 100 frames."""
    convolutions = [[3, 2, 1]] * 3
    rules = {"frames_per_s": 100.0, "window_s": 0.01, "encoder_steps": convolutions, "llm_steps": []}
    return {"audio": rules, "audio_segment_s": 1.0, "audio_frames_per_s": 13.0, "audio_merge_frames": 1}


def conformer_audio(rate: int) -> dict[str, Any]:
    """A token of ``rate`` spectrogram frames, 100 a second; longer audio is cut into blocks of 500 tokens."""
    rules = {"frames_per_s": 100.0, "window_s": 0.025, "encoder_steps": [[1, rate, 0]], "llm_steps": []}
    return {"audio": rules, "audio_segment_s": 5.0 * rate, "audio_frames_per_s": 100.0 / rate}


def whisper_audio(pooling: int, pads_llm: bool = False, heard_s: float = 0.0) -> dict[str, Any]:
    """Segments of 30 seconds, padded before Whisper's encoder; the LLM gets a token of ``pooling`` of its own."""
    rules = {
        "frames_per_s": 100.0,
        "encoder_steps": [[3, 1, 1], [3, 2, 1]],
        "llm_steps": [[pooling, pooling, 0]],
        "pads_encoder": True,
        "pads_llm": pads_llm,
        "heard_s": heard_s,
    }
    return {"audio": rules, "audio_segment_s": 30.0}
