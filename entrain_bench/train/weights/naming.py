"""Stored tensors of each parameter, by architecture of published checkpoint.

Names are of Hugging Face ``transformers`` (5.23). ``Roots`` says which prefix a checkpoint has for a name's root.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from entrain_bench.base.errors import IncompatibleError
from entrain_bench.specs.model import ModelSpec, ModuleSpec

# Prefix of names by module and root.
Roots = dict[tuple[str, str], str]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows ``start..stop`` of a stored tensor; without a name zeros, which no checkpoint stores."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Stored:
    """The stored rows of a parameter, in the parameter's order.

    ``width`` is 0 for a vector. A convolution's stored rows have the shape ``kernel``, channels first.
    """

    parts: tuple[Rows, ...]
    width: int = 0
    kernel: tuple[int, ...] = ()
    taps_first: bool = False

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the stored tensors, all of whose rows the parameter has."""
        rows = Counter[str]()
        for part in self.parts:
            rows[part.name] += part.stop - part.start
        row = self.kernel or ((self.width,) if self.width else ())
        return {name: (count, *row) for name, count in rows.items() if name}


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
    scheme = scheme_of(module)
    config = module.config
    last = len(module.layers) - 1
    parts = {ours: tuple(full_name(module, name, roots) for name in names) for ours, names in scheme.parts.items()}
    scheme = replace(scheme, block=full_name(module, scheme.block, roots), parts=parts)
    tensors: dict[str, Stored] = {}
    for index in range(1, last):
        for name, values in _block(module, scheme, scheme.block.format(index - 1)):
            tensors[f"{index}.{name}"] = values
    if module.is_encoder:
        tensors |= _ends(model, module, scheme, last)
    else:
        tensors["0.words.weight"] = _whole(scheme, "words", "weight", config.vocab_size, config.hidden_size)
        if not config.tied_embeddings:
            tensors[f"{last}.logits.weight"] = _whole(scheme, "logits", "weight", config.vocab_size, config.hidden_size)
    if not module.is_encoder or config.head_norm:
        for part in _weight_and(config.norm_bias):
            tensors[f"{last}.norm.{part}"] = _whole(scheme, "norm", part, config.hidden_size)
    return tensors


def _block(module: ModuleSpec, scheme: Scheme, block: str) -> Iterator[tuple[str, Stored]]:
    config = module.config
    hidden = config.hidden_size
    ffn = config.ffn_hidden_size
    for part in _weight_and(config.norm_bias):
        for norm in ("input_layernorm", "pre_mlp_layernorm"):
            yield f"{norm}.{part}", _whole(scheme, norm, part, hidden, block=block)
    for part in _weight_and(config.qkv_bias):
        heads = _heads(module, scheme, block, part)
        yield f"self_attention.linear_qkv.{part}", Stored(heads, hidden if part == "weight" else 0)
    products = (
        ("self_attention", "linear_proj", hidden, config.num_heads * config.head_dim),
        ("mlp", "linear_fc1", 2 * ffn if config.gated_mlp else ffn, hidden),
        ("mlp", "linear_fc2", hidden, ffn),
    )
    for part in _weight_and(config.linear_bias):
        for layer, product, rows, width in products:
            yield f"{layer}.{product}.{part}", _whole(scheme, product, part, rows, width, block=block)


def _heads(module: ModuleSpec, scheme: Scheme, block: str, part: str) -> tuple[Rows, ...]:
    """Rows of queries, keys and values; megatron-core stores each group of queries with its key and value."""
    config = module.config
    names = [f"{block}{name}.{part}" for name in scheme.parts["linear_qkv"]]
    head = config.head_dim
    groups = config.num_kv_heads
    if len(names) == 1:
        keys = config.num_heads * head
        starts = [(names[0], 0), (names[0], keys), (names[0], keys + groups * head)]
    else:
        starts = [(name, 0) for name in names]
        if part == "bias" and config.checkpoint == "whisper_encoder":
            # Whisper's keys have no bias; one would shift all scores of a query equally, and so change nothing.
            starts[1] = ("", 0)
    sizes = (config.num_heads // groups * head, head, head)
    return tuple(
        Rows(name, first + group * size, first + (group + 1) * size)
        for group in range(groups)
        for (name, first), size in zip(starts, sizes, strict=True)
    )


def _ends(model: ModelSpec, module: ModuleSpec, scheme: Scheme, last: int) -> dict[str, Stored]:
    config = module.config
    tensors = dict[str, Stored]()
    for end, layer, biased in (("embed", 0, config.norm_bias), ("head", last, True)):
        for index, gemm in enumerate(module.layers[layer].gemms):
            where = f"{end}.{index}"
            if where not in scheme.parts:
                raise IncompatibleError(
                    f"model.modules.{module.name}.{end}_gemms: checkpoint={config.checkpoint} has no product {index}"
                )
            kernel = _kernel(model, config.checkpoint, gemm.k) if end == "embed" else {}
            for part in _weight_and(biased):
                tensors[f"{layer}.products.products.{index}.{part}"] = _whole(
                    scheme, where, part, gemm.n, gemm.k, **(kernel if part == "weight" else {})
                )
    if config.learned_positions:
        tensors["0.positions"] = _whole(scheme, "positions", "weight", config.learned_positions, config.hidden_size)
    return tensors


def _kernel(model: ModelSpec, checkpoint: str, width: int) -> dict[str, Any]:
    if checkpoint == "whisper_encoder":
        return {"kernel": (width // 3, 3), "taps_first": True}
    side = model.tokens.patch_pixels
    frames = () if checkpoint == "siglip" else (width // (3 * side * side),)
    return {"kernel": (3, *frames, side, side)}


def _whole(
    scheme: Scheme, ours: str, part: str, rows: int, width: int = 0, *, block: str = "", **kernel: Any
) -> Stored:
    """A parameter of ``rows``, in equal parts if it is stored under several names."""
    names = scheme.parts[ours]
    each = rows // len(names)
    # The head's name is empty, and so its prefix ends in the dot.
    stored = (f"{block}{name}{'' if name.endswith(('.', ':')) else '.'}{part}" for name in names)
    return Stored(tuple(Rows(name, 0, each) for name in stored), width if part == "weight" else 0, **kernel)


def _weight_and(bias: bool) -> tuple[str, ...]:
    return ("weight", "bias") if bias else ("weight",)
