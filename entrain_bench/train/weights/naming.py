"""Stored tensors of each parameter, by architecture of published checkpoint.

Names are of Hugging Face ``transformers`` (5.23). ``Roots`` says which prefix a checkpoint has for a name's root.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from entrain_bench.base.arrays import IntArray
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.specs.model import ModelSpec, ModuleSpec
from entrain_bench.specs.module_layers import ModuleConfig

# Prefix of names by module and root.
Roots = dict[tuple[str, str], str]


@dataclass(frozen=True, slots=True)
class Stored:
    """The stored tensors of a parameter.

    Attributes:
        shapes: of stored tensors by name; a convolution's have channels before taps.
        order: row of all stored tensors for each of the parameter's, -1 for zeros; None: the same.
        taps_first: whether the parameter has a convolution's taps before its channels.
    """

    shapes: Mapping[str, tuple[int, ...]]
    order: IntArray | None = None
    taps_first: bool = False


@dataclass(frozen=True, slots=True)
class Scheme:
    """How checkpoints of an architecture name a module's tensors.

    Attributes:
        roots: possible prefixes of each root; the first is the default.
        block: prefix of a block's names, with its number from 0.
        parts: stored names of our parts; one part may be stored as several.
        unused: prefixes of tensors that the model does not have.
    """

    roots: Mapping[str, tuple[str, ...]]
    block: str
    parts: Mapping[str, tuple[str, ...]]
    unused: tuple[str, ...] = ()


_PROJECTOR = ("multi_modal_projector.", "model.multi_modal_projector.")
_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
SCHEMES: dict[str, Scheme] = {
    "llama": Scheme(
        roots={
            "body": ("model.", "model.language_model.", "language_model.model."),
            "head": ("lm_head.", "language_model.lm_head."),
        },
        block="body:layers.{}.",
        parts={
            "input_layernorm": ("input_layernorm",),
            "pre_mlp_layernorm": ("post_attention_layernorm",),
            "linear_qkv": _ATTENTION,
            "linear_proj": ("self_attn.o_proj",),
            "linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
            "linear_fc2": ("mlp.down_proj",),
            "words": ("body:embed_tokens",),
            "norm": ("body:norm",),
            "logits": ("head:",),
        },
        unused=("rotary_emb.inv_freq",),
    ),
    "qwen25vl_vision": Scheme(
        roots={"body": ("visual.", "model.visual.")},
        block="body:blocks.{}.",
        parts={
            "input_layernorm": ("norm1",),
            "pre_mlp_layernorm": ("norm2",),
            "linear_qkv": ("attn.qkv",),
            "linear_proj": ("attn.proj",),
            "linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
            "linear_fc2": ("mlp.down_proj",),
            "embed.0": ("body:patch_embed.proj",),
            "norm": ("body:merger.ln_q",),
            "head.0": ("body:merger.mlp.0",),
            "head.1": ("body:merger.mlp.2",),
        },
    ),
    "siglip": Scheme(
        roots={
            "body": ("vision_tower.vision_model.", "model.vision_tower.vision_model.", "model.vision_tower."),
            "projector": _PROJECTOR,
        },
        block="body:encoder.layers.{}.",
        parts={
            "input_layernorm": ("layer_norm1",),
            "pre_mlp_layernorm": ("layer_norm2",),
            "linear_qkv": _ATTENTION,
            "linear_proj": ("self_attn.out_proj",),
            "linear_fc1": ("mlp.fc1",),
            "linear_fc2": ("mlp.fc2",),
            "embed.0": ("body:embeddings.patch_embedding",),
            "positions": ("body:embeddings.position_embedding",),
            "head.0": ("projector:linear_1",),
            "head.1": ("projector:linear_2",),
        },
        # LLaVA-OneVision's LLM sees no end of a row of patches here.
        unused=("head.", "post_layernorm.", "image_newline"),
    ),
    "whisper_encoder": Scheme(
        roots={"body": ("audio_tower.", "model.audio_tower."), "projector": _PROJECTOR},
        block="body:layers.{}.",
        parts={
            "input_layernorm": ("self_attn_layer_norm",),
            "pre_mlp_layernorm": ("final_layer_norm",),
            "linear_qkv": _ATTENTION,
            "linear_proj": ("self_attn.out_proj",),
            "linear_fc1": ("fc1",),
            "linear_fc2": ("fc2",),
            "embed.0": ("body:conv1",),
            "embed.1": ("body:conv2",),
            "norm": ("body:layer_norm",),
            "head.0": ("projector:linear",),
        },
        unused=("embed_positions.weight",),
    ),
}


def scheme_of(module: ModuleSpec) -> Scheme:
    """How a module's tensors are named; ``IncompatibleError`` for an architecture that has no scheme."""
    if not module.config.checkpoint:
        raise IncompatibleError(f"model.modules.{module.name}.checkpoint: missing, so published weights cannot be read")
    return SCHEMES[module.config.checkpoint]


def default_roots(model: ModelSpec) -> Roots:
    """Prefixes of names if no checkpoint was read."""
    return {
        (module.name, root): prefixes[0]
        for module in model.modules
        for root, prefixes in scheme_of(module).roots.items()
    }


def full_name(module: ModuleSpec, name: str, roots: Roots) -> str:
    """A scheme's name as a checkpoint has it; a root that is not given stays as it is."""
    root, colon, rest = name.rpartition(":")
    return roots.get((module.name, root), root + colon) + rest


def stored_tensors(model: ModelSpec, module: ModuleSpec, roots: Roots) -> dict[str, Stored]:
    """Stored tensors of every parameter of a module, by ``named_parameters``'s key without the module's name."""
    config = module.config
    last = len(module.layers) - 1
    names = _Names(model, module, roots, scheme_of(module))
    for index in range(1, last):
        names.add_block(index)
    if module.is_encoder:
        names.add_ends(last)
    else:
        names.add("0.words.weight", "words", (config.vocab_size, config.hidden_size))
        if not config.tied_embeddings:
            names.add(f"{last}.logits.weight", "logits", (config.vocab_size, config.hidden_size))
    if not module.is_encoder or config.head_norm:
        for part in _weight_and(config.norm_bias):
            names.add(f"{last}.norm.{part}", "norm", (config.hidden_size,))
    return names.tensors


@dataclass(frozen=True, slots=True)
class _Names:
    model: ModelSpec
    module: ModuleSpec
    roots: Roots
    scheme: Scheme
    tensors: dict[str, Stored] = field(default_factory=dict)

    def add(self, key: str, ours: str, shape: tuple[int, ...], block: str = "", **options: Any) -> None:
        """A parameter whose rows are stored in equal parts."""
        names = self.names(ours, "bias" if key.endswith(".bias") else "weight", block)
        self.tensors[key] = Stored(dict.fromkeys(names, (shape[0] // len(names), *shape[1:])), **options)

    def names(self, ours: str, part: str, block: str = "") -> list[str]:
        """Stored names of a part; that of the head is empty, so its prefix ends in the dot."""
        prefixes = [full_name(self.module, block + name, self.roots) for name in self.scheme.parts[ours]]
        return [f"{prefix}{'' if prefix.endswith(('.', ':')) else '.'}{part}" for prefix in prefixes]

    def add_block(self, index: int) -> None:
        config = self.module.config
        hidden = config.hidden_size
        ffn = config.ffn_hidden_size
        block = self.scheme.block.format(index - 1)
        for part in _weight_and(config.norm_bias):
            for norm in ("input_layernorm", "pre_mlp_layernorm"):
                self.add(f"{index}.{norm}.{part}", norm, (hidden,), block)
        for part in _weight_and(config.qkv_bias):
            names = self.names("linear_qkv", part, block)
            self.tensors[f"{index}.self_attention.linear_qkv.{part}"] = _heads(config, names, part)
        products = (
            ("self_attention", "linear_proj", hidden, config.num_heads * config.head_dim),
            ("mlp", "linear_fc1", 2 * ffn if config.gated_mlp else ffn, hidden),
            ("mlp", "linear_fc2", hidden, ffn),
        )
        for layer, product, rows, width in products:
            key = f"{index}.{layer}.{product}"
            self.add(f"{key}.weight", product, (rows, width), block)
            if config.linear_bias:
                self.add(f"{key}.bias", product, (rows,), block)

    def add_ends(self, last: int) -> None:
        config = self.module.config
        for end, layer, biased in (("embed", 0, config.norm_bias), ("head", last, True)):
            for index, gemm in enumerate(self.module.layers[layer].gemms):
                where = f"{end}.{index}"
                if where not in self.scheme.parts:
                    raise IncompatibleError(
                        f"model.modules.{self.module.name}.{end}_gemms: checkpoint={config.checkpoint} has no product "
                        f"{index}"
                    )
                row = _kernel(self.model, config.checkpoint, gemm.k) if end == "embed" else (gemm.k,)
                taps_first = end == "embed" and config.checkpoint == "whisper_encoder"
                key = f"{layer}.products.products.{index}"
                self.add(f"{key}.weight", where, (gemm.n, *row), taps_first=taps_first)
                if biased:
                    self.add(f"{key}.bias", where, (gemm.n,))
        if config.learned_positions:
            self.add("0.positions", "positions", (config.learned_positions, config.hidden_size))


def _heads(config: ModuleConfig, names: Sequence[str], part: str) -> Stored:
    """Queries, keys and values; megatron-core stores each group of queries with its key and value."""
    groups = config.num_kv_heads
    head = config.head_dim
    sizes = [config.num_heads * head, groups * head, groups * head]
    missing = part == "bias" and config.checkpoint == "whisper_encoder"
    if missing:
        # Whisper's keys have no bias; one would shift all scores of a query equally, and so change nothing.
        names = (names[0], names[2])
        sizes[1] = 0
    rows = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    if missing:
        rows[1] = np.full(groups * head, -1)
    order = np.concatenate([kind.reshape(groups, -1) for kind in rows], axis=1).ravel()
    row = (config.hidden_size,) if part == "weight" else ()
    if len(names) == 1:
        return Stored({names[0]: (sum(sizes), *row)}, order)
    stored = [size for size in sizes if size]
    return Stored({name: (size, *row) for name, size in zip(names, stored, strict=True)}, order)


def _kernel(model: ModelSpec, checkpoint: str, width: int) -> tuple[int, ...]:
    if checkpoint == "whisper_encoder":
        return width // 3, 3
    side = model.tokens.patch_pixels
    frames = () if checkpoint == "siglip" else (width // (3 * side * side),)
    return 3, *frames, side, side


def _weight_and(bias: bool) -> tuple[str, ...]:
    return ("weight", "bias") if bias else ("weight",)
