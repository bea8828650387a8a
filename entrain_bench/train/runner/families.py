"""Where families of Hugging Face models keep their parts, as names of attributes; subclass ``Family`` for others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isqrt, prod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask

from entrain_bench.base.errors import unknown_choice
from entrain_bench.train.runner.samples import Item, Sample, TokenBatch, joined_inputs

type Numbers = Callable[[Sequence[int]], Tensor]


class Family:
    """A model with one encoder: names and methods of Qwen2.5-VL, to be overridden for others.

    All names of modules and parameters begin at the whole model, which has ``lm_head`` and, in ``model``, the rest.
    """

    modality: ClassVar[str] = "image"
    encoder: ClassVar[tuple[str, ...]] = ("model.visual",)  # all parts of encoder and projector
    blocks: ClassVar[str] = "model.visual.blocks"
    after: ClassVar[tuple[str, ...]] = ("model.visual.merger",)  # encoder's parts that follow its blocks
    text: ClassVar[str] = "model.language_model"
    inputs: ClassVar[tuple[str, ...]] = ("pixel_values", "image_grid_thw")
    placeholders: ClassVar[tuple[str, ...]] = ("image_token_id", "video_token_id")  # of the configuration

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model
        self.config: Any = model.config

    def part(self, name: str) -> Any:
        """A module by its name."""
        return self.model.get_submodule(name)

    @property
    def depth(self) -> int:
        """Features besides the projected ones that encoder blocks hand to the first LLM blocks (DeepStack)."""
        return 0

    @property
    def taps(self) -> tuple[int, ...]:
        """Encoder blocks whose outputs make such features."""
        return ()

    def features(self, items: Sequence[Item], device: torch.device) -> Tensor:
        """Projected tokens of items ``[LLM tokens, (1 + depth) * hidden size]``; all of the encoder runs."""
        output = self.model.model.get_image_features(**joined_inputs(items, device), return_dict=True)
        columns = [output.pooler_output, *getattr(output, "deepstack_features", ())]
        return torch.cat([_rows(column) for column in columns], dim=1)

    def is_placeholder(self, ids: Tensor) -> Tensor:
        """Whether each token is replaced by a projected one."""
        return torch.isin(ids, torch.tensor([getattr(self.config, name) for name in self.placeholders]).to(ids))

    def text_inputs(self, batch: TokenBatch, embeds: Tensor) -> dict[str, Any]:  # noqa: ARG002
        """Mask and positions as the language model takes them: here three coordinates of every token."""
        kinds = sum((batch.ids == getattr(self.config, name)) * kind for kind, name in enumerate(self.placeholders, 1))
        grids = {
            f"{modality}_grid_thw": torch.cat(rows).to(batch.ids.device)
            for modality in ("image", "video")
            if (rows := [item.inputs["image_grid_thw"] for item in batch.items if item.modality == modality])
        }
        known = {"attention_mask": batch.mask, "mm_token_type_ids": kinds}
        if not grids:
            return {"attention_mask": batch.mask}
        positions, _ = self.model.model.get_rope_index(batch.ids, **known, **grids)
        return {"attention_mask": batch.mask, "position_ids": positions}

    def placeholder(self, modality: str) -> int:
        """The token in whose places projected tokens of a modality come."""
        name = self.placeholders[1 if modality == "video" else 0]
        return int(getattr(self.config, name))

    def made_up(self, wanted: Item, grid: Sequence[int], numbers: Numbers) -> Item:
        """An item of the sizes of another with made-up ``numbers``, on a ``grid`` of patches.

        ``ValueError`` if there is none.
        """
        side = self.part("model.visual").spatial_merge_size
        squares = wanted.encoder_tokens // side**2
        if not grid or grid[0] * grid[1] != wanted.encoder_tokens:
            rows = max(count for count in range(1, isqrt(max(squares, 1)) + 1) if squares % count == 0)
            grid = rows * side, squares // rows * side
        patches = self.part("model.visual").patch_embed.proj
        width = patches.in_channels * prod(patches.kernel_size)
        inputs = {
            "pixel_values": numbers((grid[0] * grid[1], width)),
            "image_grid_thw": torch.tensor([[1, *grid]]),
        }
        return _of_sizes(Item(wanted.modality, inputs, grid[0] * grid[1], squares), wanted)

    def items(self, encoded: Mapping[str, Tensor]) -> Iterator[Item]:
        """The items of one processed sample, in the order of their tokens: here a patch is a row of pixels."""
        merged = self.part("model.visual").spatial_merge_size ** 2
        left = {}
        for kind, (pixels, grid) in enumerate((self.inputs, ("pixel_values_videos", "video_grid_thw"))):
            if grid in encoded:
                counts = encoded[grid].prod(-1).tolist()
                rows = torch.split_with_sizes(encoded[pixels], counts)
                left[kind] = list(zip(rows, encoded[grid], counts, strict=True))
        ids = encoded["input_ids"][0]
        place = 0
        tokens = [(ids == getattr(self.config, name)).nonzero().flatten().tolist() for name in self.placeholders]
        while any(left.values()):
            waiting = [which for which in left if left[which]]
            kind = min(waiting, key=lambda which: tokens[which][0] if tokens[which] else place)
            patches, size, count = left[kind].pop(0)
            tokens[kind] = tokens[kind][count // merged :]
            inputs = {"pixel_values": patches, "image_grid_thw": size[None]}
            yield Item(("image", "video")[kind], inputs, count, count // merged)

    def sample(self, encoded: Mapping[str, Tensor], labels: Tensor) -> Sample:
        """A processed sample with its labels ``[tokens]``; ``ValueError`` if its items have other tokens."""
        ids = encoded["input_ids"][0]
        items = tuple(self.items(encoded))
        found, held = int(self.is_placeholder(ids).sum()), sum(item.llm_tokens for item in items)
        if found != held:
            raise ValueError(f"{found} tokens of items in the text, but {held} in the items")
        return Sample(ids, labels, items)

    def runs(self, ids: Tensor) -> list[int]:
        """Lengths of consecutive placeholders."""
        places = self.is_placeholder(ids).to(torch.int8)
        edges = torch.diff(places, prepend=places.new_zeros(1), append=places.new_zeros(1)).nonzero().flatten()
        return (edges[1::2] - edges[::2]).tolist()


class Qwen3VL(Family):
    """Qwen3-VL and its mixture of experts: three blocks of the encoder feed the first blocks of the LLM."""

    after = ("model.visual.merger", "model.visual.deepstack_merger_list")

    @property
    def depth(self) -> int:
        """One feature for each tapped block."""
        return len(self.taps)

    @property
    def taps(self) -> tuple[int, ...]:
        """The configured blocks."""
        return tuple(self.config.vision_config.deepstack_visual_indexes)


class TiledFamily(Family):
    """A vision transformer of fixed squares and a projector: InternVL's names; an image is a run of placeholders."""

    encoder: ClassVar[tuple[str, ...]] = ("model.vision_tower", "model.multi_modal_projector")
    blocks = "model.vision_tower.encoder.layer"
    after: ClassVar[tuple[str, ...]] = ("model.vision_tower.layernorm", "model.multi_modal_projector")
    inputs: ClassVar[tuple[str, ...]] = ("pixel_values",)
    placeholders = ("image_token_id",)

    def text_inputs(self, batch: TokenBatch, embeds: Tensor) -> dict[str, Any]:  # noqa: ARG002
        """The mask; tokens are numbered one after another."""
        return {"attention_mask": batch.mask}

    @property
    def tile_tokens(self) -> int:
        """LLM tokens of a tile."""
        vision = self.config.vision_config
        side, patch = (size if isinstance(size, int) else size[0] for size in (vision.image_size, vision.patch_size))
        return int((side // patch * self.config.downsample_ratio) ** 2)

    def rows_of(self, encoded: Mapping[str, Tensor], runs: Sequence[int]) -> list[int]:
        """Rows of the encoder's inputs that each run of placeholders has: here all tiles of an image."""
        tiles = len(encoded[self.inputs[0]])
        return [run * tiles // sum(runs) for run in runs]

    def encoder_tokens(self, inputs: Mapping[str, Tensor]) -> int:
        """Tokens of an item in the encoder's blocks."""
        vision = self.config.vision_config
        side, patch = (size if isinstance(size, int) else size[0] for size in (vision.image_size, vision.patch_size))
        has_class = hasattr(self.part(self.encoder[0]), "embeddings") and hasattr(
            self.part(self.encoder[0]).embeddings, "cls_token"
        )
        return inputs[self.inputs[0]].shape[:-3].numel() * ((side // patch) ** 2 + has_class)

    def made_up(self, wanted: Item, grid: Sequence[int], numbers: Numbers) -> Item:  # noqa: ARG002
        """An item of whole tiles."""
        side = self.config.vision_config.image_size
        size = (3, side, side) if isinstance(side, int) else (3, *side)
        blank = torch.empty(1, *size, device="meta")
        each = self.encoder_tokens({"pixel_values": blank})
        tiles = max(1, wanted.encoder_tokens // each)
        inputs = {"pixel_values": numbers((tiles, *size))}
        return _of_sizes(Item(wanted.modality, inputs, tiles * each, tiles * self.tile_tokens), wanted)

    def items(self, encoded: Mapping[str, Tensor]) -> Iterator[Item]:
        """The items of one processed sample."""
        runs = self.runs(encoded["input_ids"][0])
        if not runs:
            return
        rows = self.rows_of(encoded, runs)
        cut = {name: torch.split_with_sizes(encoded[name], rows) for name in self.inputs}
        for index, run in enumerate(runs):
            inputs = {name: parts[index] for name, parts in cut.items()}
            yield Item(self.modality, inputs, self.encoder_tokens(inputs), run)


class LlavaOnevision(TiledFamily):
    """LLaVA-OneVision: a whole picture and its tiles, without padding; one image in a sample."""

    encoder = (*TiledFamily.encoder, "model.image_newline")
    blocks = "model.vision_tower.encoder.layers"
    after = ("model.vision_tower.post_layernorm", "model.multi_modal_projector", "model.image_newline")
    inputs = ("pixel_values", "image_sizes")

    def made_up(self, *_: object) -> Item:
        """Refuse: many sizes of a picture have the same number of tokens."""
        raise ValueError(
            "pictures of LLaVA-OneVision are not made up. Use the script that entrain-bench recommend writes"
        )

    def rows_of(self, encoded: Mapping[str, Tensor], runs: Sequence[int]) -> list[int]:
        """One image, whose tiles are one row."""
        if len(encoded["pixel_values"]) != len(runs) or len(runs) > 1:
            raise ValueError(f"{len(encoded['pixel_values'])} images in a sample; LLaVA-OneVision takes one here")
        return [1]


class Gemma3(TiledFamily):
    """Gemma 3: SigLIP with a pooled projector; the tokens of an image see each other."""

    blocks = "model.vision_tower.encoder.layers"
    after = ("model.vision_tower.post_layernorm", "model.multi_modal_projector")

    @property
    def tile_tokens(self) -> int:
        """LLM tokens of the square."""
        return int(self.config.mm_tokens_per_image)

    def rows_of(self, encoded: Mapping[str, Tensor], runs: Sequence[int]) -> list[int]:  # noqa: ARG002
        """One square for each run."""
        return [1] * len(runs)

    def text_inputs(self, batch: TokenBatch, embeds: Tensor) -> dict[str, Any]:
        """Masks of full and of sliding attention."""
        from transformers.models.gemma3.modeling_gemma3 import (
            create_masks_for_vision_model,
            get_block_sequence_ids_for_mask,
        )

        text = self.config.get_text_config()
        blocks = get_block_sequence_ids_for_mask(self.is_placeholder(batch.ids).long(), device=embeds.device)
        return {"attention_mask": create_masks_for_vision_model(text, embeds, batch.mask, None, None, blocks)}


class Qwen2Audio(TiledFamily):
    """Qwen2-Audio: half a minute of sound in Whisper's encoder, whose tokens are averaged in pairs."""

    modality = "audio"
    encoder = ("model.audio_tower", "model.multi_modal_projector")
    blocks = "model.audio_tower.layers"
    after = ("model.audio_tower.layer_norm", "model.multi_modal_projector")
    inputs = ("input_features", "feature_attention_mask")
    placeholders = ("audio_token_id",)

    def rows_of(self, encoded: Mapping[str, Tensor], runs: Sequence[int]) -> list[int]:  # noqa: ARG002
        """One sound for each run."""
        return [1] * len(runs)

    def encoder_tokens(self, inputs: Mapping[str, Tensor]) -> int:  # noqa: ARG002
        """The same number for every sound."""
        return int(self.config.audio_config.max_source_positions)

    def made_up(self, wanted: Item, grid: Sequence[int], numbers: Numbers) -> Item:  # noqa: ARG002
        """A sound, of which the frames of its tokens are heard."""
        config = self.config.audio_config
        frames = 2 * config.max_source_positions
        heard = min(4 * wanted.llm_tokens - 1, frames)
        tokens = ((heard - 1) // 2 + 1 - 2) // 2 + 1
        inputs = {
            "input_features": numbers((1, config.num_mel_bins, frames)),
            "feature_attention_mask": (torch.arange(frames) < heard).long()[None],
        }
        return _of_sizes(Item(wanted.modality, inputs, self.encoder_tokens(inputs), tokens), wanted)

    def features(self, items: Sequence[Item], device: torch.device) -> Tensor:
        """Projected tokens of sounds, without those of the padding."""
        inputs = joined_inputs(items, device)
        tower = self.part("model.audio_tower")
        heard, counts = tower._get_feat_extract_output_lengths(inputs["feature_attention_mask"].sum(-1))
        blank = torch.zeros(len(items), tower.config.max_source_positions, 1, dtype=tower.dtype, device=device)
        is_heard = torch.arange(blank.shape[1], device=device) < heard[:, None]
        mask = create_bidirectional_mask(tower.config, blank, is_heard.long())
        states = tower(inputs["input_features"], attention_mask=mask).last_hidden_state
        projected: Tensor = self.part("model.multi_modal_projector")(states)
        return projected[torch.arange(projected.shape[1], device=device) < counts[:, None]]


def _of_sizes(item: Item, wanted: Item) -> Item:
    if (item.encoder_tokens, item.llm_tokens) != (wanted.encoder_tokens, wanted.llm_tokens):
        raise ValueError(
            f"an item of {wanted.encoder_tokens} encoder and {wanted.llm_tokens} LLM tokens does not exist: the next "
            f"has {item.encoder_tokens} and {item.llm_tokens}. Use workload=trace with a trace of this model"
        )
    return item


def _rows(column: Tensor | Sequence[Tensor]) -> Tensor:
    rows = column if isinstance(column, Tensor) else torch.cat([*column])
    return rows.flatten(0, 1) if rows.dim() == 3 else rows


FAMILIES: Mapping[str, type[Family]] = {
    "gemma3": Gemma3,
    "internvl": TiledFamily,
    "llava_onevision": LlavaOnevision,
    "qwen2_5_vl": Family,
    "qwen2_audio": Qwen2Audio,
    "qwen2_vl": Family,
    "qwen3_vl": Qwen3VL,
    "qwen3_vl_moe": Qwen3VL,
}


def family_of(model: nn.Module) -> Family:
    """The family of a model by its configuration's type; ``UserError`` for one that the table lacks."""
    assert isinstance(model, PreTrainedModel)
    kind = str(model.config.model_type)
    if kind not in FAMILIES:
        raise unknown_choice("model_type", kind, sorted(FAMILIES))
    return FAMILIES[kind](model)
