"""Image rules of published processors: what an image becomes in the encoder and in the LLM.

A model's ``tokens.images`` states one of these by its ``kind``. ``entrain_bench_workloads.processors`` applies them.
Marker tokens, such as a row's end, are text that a processor adds around an image; they count as tokens of the image.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from entrain_bench.base.errors import require, unknown_choice
from entrain_bench.specs.parse import between, check_mapping, parse

# Sides, tokens and tiles of an image, at most: products of three stay below 2**53.
MAX_RULE = 2**17
Size = Annotated[int, between(1, MAX_RULE)]


@dataclass(frozen=True, slots=True)
class FixedSize:
    """Every image is resized to one size (LLaVA-1.5, Gemma 3).

    Attributes:
        encoder_tokens: tokens of an image in the encoder.
        llm_tokens: tokens of an image in the LLM.
    """

    encoder_tokens: Size
    llm_tokens: Size


@dataclass(frozen=True, slots=True)
class AnyResolution:
    """An image is fitted to the best of some grids of tiles and gets an overview (LLaVA-NeXT, LLaVA-OneVision).

    The overview is a further tile. Padding is cut off after encoding, and every line ends with a marker.

    Attributes:
        pixels: side of a tile.
        side: LLM tokens on a side of a tile.
        encoder_tokens: tokens of a tile in the encoder.
        overview_tokens: LLM tokens of the overview.
        grids: rows and columns of every grid, in the processor's order.
        max_tiles: images are scaled down to the LLM tokens of this many tiles; 0: never.
        single_only: whether only the sole image of a sample is cut; several are one tile and a marker each.
    """

    pixels: Size
    side: Size
    encoder_tokens: Size
    overview_tokens: Size
    grids: tuple[tuple[int, ...], ...]
    max_tiles: Annotated[int, between(0, MAX_RULE)] = 0
    single_only: bool = False


@dataclass(frozen=True, slots=True)
class NearestGrid:
    """An image is stretched to the grid with the nearest aspect ratio (InternVL).

    Images of several tiles get an overview, a further tile.

    Attributes:
        pixels: side of a tile.
        max_tiles: tiles of a grid at most.
        encoder_tokens: tokens of a tile in the encoder.
        llm_tokens: tokens of a tile in the LLM.
        markers: marker tokens of an image.
    """

    pixels: Size
    max_tiles: Annotated[int, between(0, MAX_RULE)]
    encoder_tokens: Size
    llm_tokens: Size
    markers: Annotated[int, between(0, MAX_RULE)] = 2


@dataclass(frozen=True, slots=True)
class LongestEdge:
    """An image is resized by its longest edge, cut into tiles, and gets an overview (Idefics3, SmolVLM).

    Attributes:
        pixels: side of a tile.
        longest_edge: longest side after resizing, in pixels.
        encoder_tokens: tokens of a tile in the encoder.
        llm_tokens: tokens of a tile in the LLM, without its two markers.
    """

    pixels: Size
    longest_edge: Size
    encoder_tokens: Size
    llm_tokens: Size


@dataclass(frozen=True, slots=True)
class NativeSize:
    """An image keeps its size up to a longest edge; every row of patches ends with a marker (Pixtral, Mistral 3).

    Attributes:
        pixels: side of an LLM token: of the square of patches that are merged into it.
        longest_edge: longest side after resizing, in pixels.
        merge: patches on a side of that square.
    """

    pixels: Size
    longest_edge: Size
    merge: Size = 1


@dataclass(frozen=True, slots=True)
class Resampled:
    """An image is resized between two edges; a resampler makes a fixed number of LLM tokens of it (Idefics2).

    Attributes:
        pixels: side of a patch.
        shortest_edge, longest_edge: limits of the sides after resizing, in pixels.
        llm_tokens: tokens of an image or quarter in the LLM, without markers.
        quarters: whether the four quarters of an image are encoded, too.
    """

    pixels: Size
    shortest_edge: Size
    longest_edge: Size
    llm_tokens: Size
    quarters: bool = False


@dataclass(frozen=True, slots=True)
class PaddedGrid:
    """An image is padded to a grid of tiles, with an overview; padding is cut off after encoding (Phi-4-multimodal).

    Attributes:
        pixels: side of a tile.
        patch_pixels: side of a patch; 2 x 2 patches become an LLM token.
        max_tiles: tiles of a grid at most; larger images take the grid with the nearest aspect ratio.
    """

    pixels: Size
    patch_pixels: Size
    max_tiles: Size


type ImageRules = FixedSize | AnyResolution | NearestGrid | LongestEdge | NativeSize | Resampled | PaddedGrid
KINDS: Mapping[str, type[ImageRules]] = {
    "fixed_size": FixedSize,
    "any_resolution": AnyResolution,
    "nearest_grid": NearestGrid,
    "longest_edge": LongestEdge,
    "native_size": NativeSize,
    "resampled": Resampled,
    "padded_grid": PaddedGrid,
}


def parse_images(values: Any, where: str) -> ImageRules:
    """The rules that a mapping with ``kind`` states; ``UserError`` for what is unknown or out of range."""
    given = dict(check_mapping(values, where))
    kind = str(given.pop("kind", ""))
    if kind not in KINDS:
        raise unknown_choice(f"{where}.kind", kind, KINDS)
    rules: ImageRules = parse(KINDS[kind], given, where)
    if isinstance(rules, AnyResolution):
        grids = [*map(list, rules.grids)]
        fits = all(len(grid) == 2 and min(grid) >= 1 and max(grid) <= MAX_RULE for grid in grids)
        require(bool(grids) and fits, f"{where}.grids", grids, "pairs of rows and columns, at least one")
    return rules
