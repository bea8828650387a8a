"""How a model turns pixels, seconds and characters into tokens."""

from dataclasses import dataclass

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
