"""How a model turns pixels, seconds and characters into tokens."""

from dataclasses import dataclass
from typing import Annotated

from entrain_bench.specs.image_rules import ImageRules
from entrain_bench.specs.parse import Allowed, between

# Tokens of a sequence or of an item, at most.
MAX_TOKENS = 2**30
Size = Annotated[int, between(1, MAX_TOKENS, f"positive, at most {MAX_TOKENS}")]
Amount = Annotated[float, between(1 / MAX_TOKENS, MAX_TOKENS, f"positive, from {1 / MAX_TOKENS:.2g} to {MAX_TOKENS}")]
# Tiles on a side of a grid: every grid is tried on every image.
MAX_GRID = 32
MAX_DYNAMIC = 256
# Kernel, stride or padding of a convolution over audio.
MAX_STEP = 2**12


@dataclass(frozen=True, slots=True)
class TileRules:
    """Images cut into tiles of one size, as by LLaVA-OneVision's and InternVL's preprocessing ("anyres").

    Attributes:
        pixels: side of a tile.
        encoder_side: patches on a side of a tile, in the encoder.
        llm_side: tokens on a side of a tile, after the projector.
        max_grid: tiles on a side of the largest grid; a thumbnail is a further tile of every image that is cut.
        max_llm_tiles: larger images are scaled down to the LLM tokens of so many tiles; their tiles are all encoded.
        max_frames: frames of a video at most.
        dynamic_tiles: None: as above. Else InternVL's dynamic tiling: every image by itself, on the grid of at most so
            many tiles whose proportions are nearest, with all tokens of all tiles, the thumbnail's included;
            ``max_grid`` and ``max_llm_tiles`` decide nothing.
    """

    pixels: Size
    encoder_side: Size
    llm_side: Size
    max_grid: Annotated[int, between(1, MAX_GRID)]
    max_llm_tiles: Size
    max_frames: Size
    dynamic_tiles: Annotated[int, between(1, MAX_DYNAMIC)] | None = None


@dataclass(frozen=True, slots=True)
class FrameRules:
    """Video as frames of one size, each an item.

    Attributes:
        encoder_tokens: tokens of a frame in the encoder.
        llm_tokens: tokens of a frame in the LLM.
        max_frames: frames of a video at most; longer ones are sampled evenly.
    """

    encoder_tokens: Size
    llm_tokens: Size
    max_frames: Size


def are_steps(steps: tuple[tuple[int, ...], ...]) -> bool:
    """Whether these are kernel, stride and padding of convolutions over audio."""
    return all(len(step) == 3 and min(step[:2]) >= 1 and step[2] >= 0 and max(step) <= MAX_STEP for step in steps)


Steps = Annotated[
    tuple[tuple[int, ...], ...], Allowed(are_steps, "triples of kernel and stride, at least 1, and padding")
]


@dataclass(frozen=True, slots=True)
class AudioRules:
    """Audio as a published processor and encoder count it, segment by segment.

    Lengths shrink by steps ``[kernel, stride, padding]``, as convolutions without dilation do: from n to
    ``(n + 2 * padding - kernel) // stride + 1``.

    Attributes:
        frames_per_s: spectrogram frames of a second.
        window_s: length of the window that a frame sees; 0: audio is padded, so that a started frame counts.
        encoder_steps: from spectrogram frames to encoder tokens.
        llm_steps: from encoder tokens to LLM tokens.
        pads_encoder: whether the encoder works on full segments, however short the audio.
        pads_llm: whether the LLM gets the tokens of full segments.
    """

    frames_per_s: Amount
    encoder_steps: Steps
    llm_steps: Steps
    window_s: Annotated[float, between(0, 1)] = 0.0
    pads_encoder: bool = False
    pads_llm: bool = False


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Token rules of one model.

    Attributes:
        patch_pixels: side of a vision patch; one encoder token a patch.
        merge_patches: side of the square of patches that becomes one LLM token.
        min_image_tokens: smallest image, in LLM tokens; smaller ones are enlarged.
        temporal_patch_frames: video frames that one patch spans.
        video_frames_per_s: frames sampled from a second of video.
        audio_frames_per_s: encoder tokens from a second of audio, after the convolutions.
        audio_merge_frames: encoder tokens pooled into one LLM token.
        audio_segment_s: longest audio encoded as one item; longer audio is cut.
        text_chars_per_token: characters of text a token, for traces without token counts.
        context_tokens: longest sample that the LLM takes, in LLM tokens; the LLM's own, or None for any.
        max_image_tokens: largest image, in LLM tokens, where a workload allows larger ones; None: the workload decides.
        images: another rule for images than patches of their own size or ``tiles``.
        frames: another rule for video than groups of ``temporal_patch_frames``.
        audio: another rule for audio than ``audio_frames_per_s`` and ``audio_merge_frames``.
    """

    patch_pixels: Size
    merge_patches: Size
    min_image_tokens: Size
    temporal_patch_frames: Size
    video_frames_per_s: Amount
    audio_frames_per_s: Amount
    audio_merge_frames: Size
    audio_segment_s: Amount
    text_chars_per_token: Amount
    context_tokens: Size | None = None
    tiles: TileRules | None = None
    max_image_tokens: Amount | None = None
    images: ImageRules | None = None
    frames: FrameRules | None = None
    audio: AudioRules | None = None
