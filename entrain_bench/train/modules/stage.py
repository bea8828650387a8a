"""A stage: consecutive layers of one module on one rank."""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from entrain_bench.errors import IncompatibleError
from entrain_bench.program.layout import check_tensor_parallel
from entrain_bench.specs.model import ModelSpec, ModuleSpec
from entrain_bench.train.device import to_device
from entrain_bench.train.modules.attention import FLASH_HEAD_DIMS, uses_flash
from entrain_bench.train.modules.blocks import transformer_block, transformer_config
from entrain_bench.train.modules.ends import EncoderEmbedding, LanguageHead, Projector, TokenEmbedding, merge_tokens
from entrain_bench.train.modules.packing import (
    Pack,
    Segments,
    Share,
    StageGroups,
    positions_of,
    segments_of,
    sequence_lengths_of,
    share_of,
)
from entrain_bench.train.modules.parameters import initialise
from entrain_bench.train.modules.positions import grid_places, grid_rotary_angles, rotary_angles, sinusoids


class Stage(torch.nn.Module):
    """Layers of a module: layer 0 embeds, the last projects (encoders) or gives the loss (LLM).

    Attributes:
        module: the module.
        config: megatron-core's description of its blocks.
        groups: process groups of this rank.
        held: the layers held.
    """

    def __init__(
        self, module: ModuleSpec, held: range, groups: StageGroups, *, dtype: torch.dtype, recompute: bool
    ) -> None:
        super().__init__()
        self.module, self.held, self.groups, self.recompute = module, held, groups, recompute
        self.config = transformer_config(module, groups.tp.size(), dtype)
        self.layers = torch.nn.ModuleDict({str(index): self._layer(index) for index in held})
        self.to(dtype)
        if (copy := self.tied_embedding()) is not None and not self._is_first:
            copy.shared = True  # type: ignore[attr-defined]  # megatron-core counts it once in gradient norms

    @property
    def _is_first(self) -> bool:
        return self.held.start == 0

    @property
    def _is_last(self) -> bool:
        return self.held.stop == len(self.module.layers)

    def forward(self, hidden: Tensor | None, pack: Pack) -> Tensor:
        """Run the layers on a chunk.

        Args:
            hidden: a first stage takes the features of all tokens ``[sum(lengths), input_width]`` (encoder) or all
                projected tokens ``[number of -1 in token_ids, hidden_size]`` (LLM; None for none); others the hidden
                states of this rank's tokens ``[ceil(sum(lengths) / cp), hidden_size]``.
            pack: the chunk's sequences.

        Returns:
            Hidden states of this rank's tokens; from a last stage LLM tokens ``[sum(outputs), LLM hidden size]``
            (encoder) or the summed loss over this rank's labelled positions, a float32 scalar (LLM).
        """
        assert sum(pack.lengths) > 0, "empty chunk"
        share = share_of(sum(pack.lengths), self.groups.cp)
        if self._is_first:
            hidden = self.layers["0"](hidden, pack, share)
            if not self.module.config.rotary:
                hidden = hidden + self._sinusoids(pack, share, hidden)
        assert hidden is not None
        hidden = self._run_blocks(hidden, pack, share)
        if not self._is_last:
            return hidden
        head = self.layers[str(self.held[-1])]
        if isinstance(head, Projector):
            return head(hidden, pack)  # type: ignore[no-any-return]
        return head(hidden, pack, share, self.tied_embedding() if self._is_first else None)  # type: ignore[no-any-return]

    def tied_embedding(self) -> Parameter | None:
        """The vocabulary's weight that first and last stage share (each holds a copy), or None."""
        if not self.module.config.tied_embeddings or not (self._is_first or self._is_last):
            return None
        if self._is_first:
            return self.layers["0"].words.weight  # type: ignore[return-value, union-attr]
        return self.layers[str(self.held[-1])].logits.weight  # type: ignore[return-value, union-attr]

    def _layer(self, index: int) -> torch.nn.Module:
        module, config, groups = self.module, self.config, self.groups
        if 0 < index < len(module.layers) - 1:
            return transformer_block(module, index, config, groups)  # type: ignore[no-any-return]
        if module.is_encoder:
            return EncoderEmbedding(module, config, groups) if index == 0 else Projector(module, config, groups)
        if index == 0:
            return TokenEmbedding(module, config, groups)
        own_weight = not (module.config.tied_embeddings and self._is_first)
        return LanguageHead(module, config, groups, own_weight=own_weight)

    def _run_blocks(self, hidden: Tensor, pack: Pack, share: Share) -> Tensor:
        blocks = [index for index in self.held if 0 < index < len(self.module.layers) - 1]
        if not blocks:
            return hidden
        rotary = self._rotary(pack, share, hidden.device)
        segments = {}
        hidden = hidden.unsqueeze(1)
        for index in blocks:
            attention = self.module.layers[index].attention
            assert attention is not None
            window = attention.window_tokens
            if window not in segments:
                segments[window] = segments_of(
                    pack.lengths, share, causal=attention.causal, device=hidden.device, window_tokens=window
                )
            inputs = (self.layers[str(index)], hidden, segments[window], rotary)
            if self.recompute and torch.is_grad_enabled():
                hidden = checkpoint(_run_block, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = _run_block(*inputs)
        return hidden.squeeze(1)

    def _rotary(self, pack: Pack, share: Share, device: torch.device) -> Tensor | None:
        config = self.module.config
        if not config.rotary:
            return None
        positions = positions_of(pack.lengths, share)
        if not _on_grid(self.module):
            return rotary_angles(to_device(positions, device), config.head_dim)
        places = grid_places(positions, sequence_lengths_of(pack.lengths, share), merge_tokens(self.module))
        rows, columns = to_device(torch.stack(places), device)
        return grid_rotary_angles(rows, columns, config.head_dim)

    def _sinusoids(self, pack: Pack, share: Share, hidden: Tensor) -> Tensor:
        positions = to_device(positions_of(pack.lengths, share), hidden.device)
        return sinusoids(positions, hidden.shape[1]).to(hidden.dtype)


def build_stage(
    model: ModelSpec,
    module: ModuleSpec,
    layers: range,
    groups: StageGroups,
    *,
    dtype: torch.dtype,
    seed: int,
    device: torch.device,
    recompute: bool,
) -> Stage:
    """Build and initialise a stage; call ``prepare_platform`` before.

    Args:
        model: the model.
        module: one of its modules.
        layers: indices into the module's layers: the embedding, the blocks, the head.
        groups: process groups of this rank.
        dtype: of parameters and activations: float32 or bfloat16.
        seed: of the initial weights, which do not depend on the layout.
        device: of the parameters.
        recompute: whether each block keeps its input only and runs again in backward.

    Raises:
        IncompatibleError: for an architecture that cannot be built, or whose heads the GPU's attention cannot take.
        UserError: if tensor parallelism does not divide a width.
    """
    _check(model, module, groups.tp.size())
    if uses_flash(dtype, device) and module.config.head_dim not in FLASH_HEAD_DIMS:
        raise IncompatibleError(
            f"model.modules.{module.name}.head_dim={module.config.head_dim}: flash attention in bfloat16 needs a "
            f"multiple of {FLASH_HEAD_DIMS.step}, at most {FLASH_HEAD_DIMS[-1]}"
        )
    with torch.device(device):
        stage = Stage(module, layers, groups, dtype=dtype, recompute=recompute)
    initialise(stage, seed)
    return stage


def _check(model: ModelSpec, module: ModuleSpec, tp: int) -> None:
    check_tensor_parallel(module, tp)
    config, where = module.config, f"model.modules.{module.name}"
    llm_size = model.llm.config.hidden_size
    if module.is_encoder and module.layers[-1].gemms[-1].n != llm_size:
        raise IncompatibleError(f"{where}.head_gemms: the last must give the LLM's hidden_size={llm_size}")
    unit = 4 if _on_grid(module) else 2
    if config.rotary and config.head_dim % unit:
        raise IncompatibleError(f"{where}.head_dim={config.head_dim}: rotary positions need a multiple of {unit}")


def _on_grid(module: ModuleSpec) -> bool:
    """Whether rotary positions are two-dimensional: in encoders of pictures."""
    return module.is_encoder and "audio" not in module.config.modalities


def _run_block(block: TransformerLayer, hidden: Tensor, segments: Segments, rotary: Tensor | None) -> Tensor:
    output, _ = block(hidden, attention_mask=segments, rotary_pos_emb=rotary)
    return output  # type: ignore[no-any-return]
