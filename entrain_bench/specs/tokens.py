"""How a model turns pixels, seconds and characters into tokens."""

from dataclasses import dataclass

from entrain_bench.specs.image_rules import ImageRules

# Tokens of a sequence or of an item, at most.
MAX_TOKENS = 2**30


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

    pixels: int
    encoder_side: int
    llm_side: int
    max_grid: int
    max_llm_tiles: int
    max_frames: int
    dynamic_tiles: int | None = None


@dataclass(frozen=True, slots=True)
class FrameRules:
    """Video as frames of one size, each an item.

    Attributes:
        encoder_tokens: tokens of a frame in the encoder.
        llm_tokens: tokens of a frame in the LLM.
        max_frames: frames of a video at most; longer ones are sampled evenly.
    """

    encoder_tokens: int
    llm_tokens: int
    max_frames: int


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

    frames_per_s: float
    encoder_steps: tuple[tuple[int, ...], ...]
    llm_steps: tuple[tuple[int, ...], ...]
    window_s: float = 0.0
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

    patch_pixels: int
    merge_patches: int
    min_image_tokens: int
    temporal_patch_frames: int
    video_frames_per_s: float
    audio_frames_per_s: float
    audio_merge_frames: int
    audio_segment_s: float
    text_chars_per_token: float
    context_tokens: int | None = None
    tiles: TileRules | None = None
    max_image_tokens: float | None = None
    images: ImageRules | None = None
    frames: FrameRules | None = None
    audio: AudioRules | None = None
