"""How a model turns pixels, seconds and characters into tokens, markers included, by published processors' rules."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from entrain_bench.base.errors import unknown_choice
from entrain_bench.specs.parse import Allowed, OneOf, between, check_mapping, parse

MAX_TOKENS = 2**30  # tokens of a sequence or of an item, at most
Size = Annotated[int, between(1, MAX_TOKENS, f"positive, at most {MAX_TOKENS}")]
Amount = Annotated[float, between(1 / MAX_TOKENS, MAX_TOKENS, f"positive, from {1 / MAX_TOKENS:.2g} to {MAX_TOKENS}")]
MAX_RULE = 2**17  # sides, tokens and tiles of an image, at most: products of three stay below 2**53
Side = Annotated[int, between(1, MAX_RULE)]
SideOrNone = Annotated[int, between(0, MAX_RULE)]
# Tiles on a side of a grid: every grid is tried on every image.
MAX_GRID = 32
MAX_DYNAMIC = 256
MAX_STEP = 2**12  # kernel, stride or padding of a convolution over audio


def are_grids(grids: tuple[tuple[int, ...], ...]) -> bool:
    """Whether these are rows and columns of grids, at least one."""
    return bool(grids) and all(len(grid) == 2 and min(grid) >= 1 and max(grid) <= MAX_RULE for grid in grids)


Grids = Annotated[tuple[tuple[int, ...], ...], Allowed(are_grids, "pairs of rows and columns, at least one")]


@dataclass(frozen=True, slots=True)
class FixedSize:
    """Every image is resized to one size (LLaVA-1.5, Gemma 3)."""

    encoder_tokens: Side
    llm_tokens: Side


@dataclass(frozen=True, slots=True)
class AnyResolution:
    """An image is fitted to the best of some grids of tiles, with an overview (LLaVA-NeXT, LLaVA-OneVision)."""

    pixels: Side  # side of a tile
    side: Side  # LLM tokens on a side of a tile
    encoder_tokens: Side  # of a tile
    overview_tokens: Side  # of the overview in the LLM
    grids: Grids  # rows and columns of every grid, in the processor's order
    max_tiles: SideOrNone = 0  # images are scaled down to the LLM tokens of this many tiles; 0: never
    single_only: bool = False  # only the sole image of a sample is cut; several are one tile and a marker each


@dataclass(frozen=True, slots=True)
class NearestGrid:
    """An image is stretched to the grid with the nearest aspect ratio (InternVL); several tiles get an overview."""

    pixels: Side  # side of a tile
    max_tiles: SideOrNone
    encoder_tokens: Side  # of a tile
    llm_tokens: Side  # of a tile
    markers: SideOrNone = 2  # marker tokens of an image
    divided: bool = False  # several images of a sample share max_tiles, as in InternVL's trainer


@dataclass(frozen=True, slots=True)
class LongestEdge:
    """An image is resized by its longest edge, cut into tiles, and gets an overview (Idefics3, SmolVLM)."""

    pixels: Side  # side of a tile
    longest_edge: Side  # longest side after resizing, in pixels
    encoder_tokens: Side  # of a tile
    llm_tokens: Side  # of a tile, without its two markers


@dataclass(frozen=True, slots=True)
class NativeSize:
    """An image keeps its size up to a longest edge; every row of patches ends with a marker (Pixtral, Mistral 3)."""

    pixels: Side  # side of an LLM token: of the square of patches that are merged into it
    longest_edge: Side  # longest side after resizing, in pixels
    merge: Side = 1  # patches on a side of that square


@dataclass(frozen=True, slots=True)
class PaddedSize:
    """An image keeps its size up to a number of patches, and is padded to whole LLM tokens (MoonViT)."""

    pixels: Side  # side of a patch
    max_patches: Size  # of an image, in squares of whole patches before padding
    max_side: Side  # patches on a side
    merge: Side  # patches on a side of the square that is merged into an LLM token


@dataclass(frozen=True, slots=True)
class Resampled:
    """An image is resized between two edges; a resampler makes a fixed number of LLM tokens of it (Idefics2)."""

    pixels: Side  # side of a patch
    shortest_edge: Side  # limits of the sides after resizing, in pixels
    longest_edge: Side
    llm_tokens: Side  # of an image or quarter, without markers
    quarters: bool = False  # the four quarters of an image are encoded, too


@dataclass(frozen=True, slots=True)
class PaddedGrid:
    """An image is padded to a grid of tiles, with an overview; padding is cut off after encoding (Phi-4-multimodal)."""

    pixels: Side  # side of a tile
    patch_pixels: Side  # side of a patch; 2 x 2 patches become an LLM token
    max_tiles: Side  # larger images take the grid with the nearest aspect ratio


type ImageRules = (
    FixedSize | AnyResolution | NearestGrid | LongestEdge | NativeSize | PaddedSize | Resampled | PaddedGrid
)
KINDS: Mapping[str, type[ImageRules]] = {
    "fixed_size": FixedSize,
    "any_resolution": AnyResolution,
    "nearest_grid": NearestGrid,
    "longest_edge": LongestEdge,
    "native_size": NativeSize,
    "padded_size": PaddedSize,
    "resampled": Resampled,
    "padded_grid": PaddedGrid,
}


def parse_images(values: Any, where: str) -> ImageRules:
    """Return the rules of a mapping with ``kind``; ``UserError`` for an unknown key or a value out of range."""
    given = dict(check_mapping(values, where))
    kind = str(given.pop("kind", ""))
    if kind not in KINDS:
        raise unknown_choice(f"{where}.kind", kind, KINDS)
    return parse(KINDS[kind], given, where)


@dataclass(frozen=True, slots=True)
class TileRules:
    """Images cut into tiles of one size, as by LLaVA-OneVision's and InternVL's preprocessing ("anyres")."""

    pixels: Size  # side of a tile
    encoder_side: Size  # patches on a side of a tile, in the encoder
    llm_side: Size  # tokens on a side of a tile, after the projector
    max_grid: Annotated[int, between(1, MAX_GRID)]  # tiles on a side of the largest grid, without the thumbnail
    max_llm_tiles: Size  # larger images are scaled down to the LLM tokens of this many tiles, which are all encoded
    max_frames: Size  # of a video
    dynamic_tiles: Annotated[int, between(1, MAX_DYNAMIC)] | None = None  # instead of ``max_grid``, any proportions


@dataclass(frozen=True, slots=True)
class FrameRules:
    """Video as frames of one size, each an item, of at most ``max_frames``; longer videos are sampled evenly."""

    encoder_tokens: Size
    llm_tokens: Size
    max_frames: Size


TRANSFORMERS = "transformers"
QWEN_VL_UTILS = "qwen_vl_utils"


@dataclass(frozen=True, slots=True)
class VideoRules:
    """Frames of a video as Qwen's video processors choose and resize them; pixels are those of a frame.

    ``rule``: ``transformers`` is the default of its processors, ``qwen_vl_utils`` their ``cap_pixels_per_frame``, as in
    the package of that name.
    """

    min_pixels: Size
    max_pixels: Size
    max_tokens: Size  # LLM tokens of which qwen_vl_utils allows 90% to a video; shared: all to a frame
    shared: bool = False  # pixels are those of all frames together (Qwen3-VL)
    min_frames: Size = 4
    max_frames: Size = 768
    rule: Annotated[str, OneOf([TRANSFORMERS, QWEN_VL_UTILS])] = TRANSFORMERS


def are_steps(steps: tuple[tuple[int, ...], ...]) -> bool:
    """Whether these are kernel, stride and padding of convolutions over audio."""
    return all(len(step) == 3 and min(step[:2]) >= 1 and step[2] >= 0 and max(step) <= MAX_STEP for step in steps)


STEP_WORDS = "triples of kernel and stride, at least 1, and padding"
Steps = Annotated[tuple[tuple[int, ...], ...], Allowed(are_steps, STEP_WORDS)]


@dataclass(frozen=True, slots=True)
class AudioRules:
    """Audio as a published processor and encoder count it, segment by segment.

    Steps ``[kernel, stride, padding]`` shrink lengths from n to ``(n + 2 * padding - kernel) // stride + 1``.
    """

    frames_per_s: Amount  # spectrogram frames of a second
    encoder_steps: Steps  # from spectrogram frames to encoder tokens
    llm_steps: Steps  # from encoder tokens to LLM tokens
    window_s: Annotated[float, between(0, 1)] = 0.0  # that a frame sees; 0: padded, so that a started frame counts
    pads_encoder: bool = False  # the encoder works on full segments, however short the audio
    pads_llm: bool = False  # the LLM gets the tokens of full segments
    heard_s: Annotated[float, between(0, MAX_TOKENS)] = 0.0  # longer audio is cut off; 0: none is


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Token rules of one model; sides in pixels."""

    patch_pixels: Size  # side of a vision patch; one encoder token a patch
    merge_patches: Size  # side of the square of patches that becomes one LLM token
    min_image_tokens: Amount  # smallest image, in LLM tokens; smaller ones are enlarged
    temporal_patch_frames: Size  # video frames that one patch spans
    video_frames_per_s: Amount  # frames sampled from a second of video
    audio_frames_per_s: Amount  # encoder tokens from a second of audio, after the convolutions
    audio_merge_frames: Size  # encoder tokens pooled into one LLM token
    audio_segment_s: Amount  # longest audio encoded as one item; longer audio is cut
    text_chars_per_token: Amount  # characters of text a token, for traces without token counts
    context_tokens: Size | None = None  # longest sample that the LLM takes, in LLM tokens; None: any
    tiles: TileRules | None = None
    max_image_tokens: Amount | None = None  # largest image, in LLM tokens; None: the workload decides
    images: ImageRules | None = None  # instead of patches of their own size or ``tiles``
    frames: FrameRules | None = None  # instead of groups of ``temporal_patch_frames``
    video: VideoRules | None = None  # limits of a video's frames; None: the workload's for a frame, none for a video
    audio: AudioRules | None = None  # instead of ``audio_frames_per_s`` and ``audio_merge_frames``
