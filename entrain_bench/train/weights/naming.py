"""Which tensors of a published checkpoint a module's parameters are made of.

Names are of Hugging Face ``transformers`` (5.23) and of the checkpoints on its hub, whose beginnings differ: a name is
``root:rest``, and a checkpoint says which beginning each root has (``Scheme.roots``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from entrain_bench.base.errors import IncompatibleError
from entrain_bench.specs.model import ModelSpec, ModuleSpec


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows ``start..stop`` of a stored tensor; of none (zeros that no checkpoint has) if the name is empty."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Stored:
    """What a parameter is made of: its rows, one part after the other.

    Attributes:
        parts: stored rows in the parameter's order.
        width: features of a row; 0 for a vector.
        kernel: what a stored row's shape is, if not ``[width]``: of a convolution, channels first.
        taps_first: whether the parameter has a kernel's taps before its channels.
    """

    parts: tuple[Rows, ...]
    width: int
    kernel: tuple[int, ...] = ()
    taps_first: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The stored tensors, each once."""
        return tuple(dict.fromkeys(part.name for part in self.parts if part.name))

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Shape of a stored tensor: the parameter has all of its rows."""
        rows = sum(part.stop - part.start for part in self.parts if part.name == name)
        return (rows, *(self.kernel or ((self.width,) if self.width else ())))


@dataclass(frozen=True, slots=True)
class Scheme:
    """How checkpoints of an architecture name a module's tensors.

    Attributes:
        roots: beginnings that checkpoints give the names of each root; the first is written where none was read.
        block: of the blocks, by number from 0.
        parts: names in a block and at the ends, by ours; several are stored one by one (queries, keys and values; gate
            and up).
        unused: beginnings, under any beginning of a root, of what checkpoints hold besides.
    """

    roots: Mapping[str, tuple[str, ...]]
    block: str
    parts: Mapping[str, tuple[str, ...]]
    unused: tuple[str, ...] = ()


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
            "projector": ("multi_modal_projector.", "model.multi_modal_projector."),
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
        roots={
            "body": ("audio_tower.", "model.audio_tower."),
            "projector": ("multi_modal_projector.", "model.multi_modal_projector."),
        },
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
    """How a module's tensors are named.

    Raises:
        IncompatibleError: for a module of an architecture that has no scheme.
    """
    if not module.config.checkpoint:
        raise IncompatibleError(
            f"model.modules.{module.name}.checkpoint: not stated, so no published weights can be read"
        )
    return SCHEMES[module.config.checkpoint]


def stored_tensors(model: ModelSpec, module: ModuleSpec) -> dict[str, Stored]:
    """What every parameter of a module is made of, by ``named_parameters``'s key without the module's name."""
    scheme, config = scheme_of(module), module.config
    last = len(module.layers) - 1
    found: dict[str, Stored] = {}
    for index in range(1, last):
        for name, values in _block(module, scheme, scheme.block.format(index - 1)):
            found[f"{index}.{name}"] = values
    norm_parts = ("weight", "bias") if config.norm_bias else ("weight",)
    if not module.is_encoder:
        found["0.words.weight"] = _whole(scheme, "words", "weight", config.vocab_size, config.hidden_size)
        if not config.tied_embeddings:
            found[f"{last}.logits.weight"] = _whole(scheme, "logits", "weight", config.vocab_size, config.hidden_size)
    else:
        found |= _ends(model, module, scheme, last)
    if not module.is_encoder or config.head_norm:
        found |= {f"{last}.norm.{part}": _whole(scheme, "norm", part, config.hidden_size) for part in norm_parts}
    return found


def _block(module: ModuleSpec, scheme: Scheme, block: str) -> Iterator[tuple[str, Stored]]:
    config = module.config
    hidden, ffn, head = config.hidden_size, config.ffn_hidden_size, config.head_dim
    queries = config.num_heads * head
    for part in ("weight", "bias") if config.norm_bias else ("weight",):
        for norm in ("input_layernorm", "pre_mlp_layernorm"):
            yield f"{norm}.{part}", _whole(scheme, norm, part, hidden, block=block)
    wide = 2 * ffn if config.gated_mlp else ffn
    for part, biased, width in (("weight", True, hidden), ("bias", config.qkv_bias, 0)):
        if biased:
            yield f"self_attention.linear_qkv.{part}", Stored(_heads(module, scheme, block, part), width)
    for part, biased in (("weight", True), ("bias", config.linear_bias)):
        if not biased:
            continue
        vector = part == "bias"
        names = [f"{block}{name}.{part}" for name in scheme.parts["linear_fc1"]]
        each = wide // len(names)
        yield f"mlp.linear_fc1.{part}", Stored(tuple(Rows(name, 0, each) for name in names), 0 if vector else hidden)
        yield (
            f"self_attention.linear_proj.{part}",
            _whole(scheme, "linear_proj", part, hidden, 0 if vector else queries, block=block),
        )
        yield f"mlp.linear_fc2.{part}", _whole(scheme, "linear_fc2", part, hidden, 0 if vector else ffn, block=block)


def _heads(module: ModuleSpec, scheme: Scheme, block: str, part: str) -> tuple[Rows, ...]:
    """Rows of queries, keys and values: megatron-core has those of a group of queries with its key and value."""
    config, names = module.config, scheme.parts["linear_qkv"]
    head, groups = config.head_dim, config.num_kv_heads
    per_group = config.num_heads // groups * head
    if len(names) == 1:
        name = f"{block}{names[0]}.{part}"
        keys = config.num_heads * head
        values = keys + groups * head
        three = ((name, 0), (name, keys), (name, values))
    else:
        # Whisper's keys have no bias, and none would change anything: it shifts all of a query's scores alike.
        absent = part == "bias" and module.config.checkpoint == "whisper_encoder"
        query, key, value = (f"{block}{name}.{part}" for name in names)
        three = ((query, 0), ("" if absent else key, 0), (value, 0))
    rows = []
    for group in range(groups):
        for (name, first), size in zip(three, (per_group, head, head), strict=True):
            rows.append(Rows(name, first + group * size, first + (group + 1) * size))
    return tuple(rows)


def _ends(model: ModelSpec, module: ModuleSpec, scheme: Scheme, last: int) -> dict[str, Stored]:
    """Products of an encoder's embedding and projector."""
    config, found = module.config, dict[str, Stored]()
    for end, layer, biased in (("embed", 0, config.norm_bias), ("head", last, True)):
        for index, gemm in enumerate(module.layers[layer].gemms):
            where = f"{end}.{index}"
            if where not in scheme.parts:
                raise IncompatibleError(
                    f"model.modules.{module.name}.{end}_gemms: checkpoint={config.checkpoint} has no product {index}"
                )
            ours = f"{layer}.products.products.{index}"
            kernel = _kernel(model, config.checkpoint, gemm.k) if end == "embed" else {}
            found[f"{ours}.weight"] = _whole(scheme, where, "weight", gemm.n, gemm.k, **kernel)
            if biased:
                found[f"{ours}.bias"] = _whole(scheme, where, "bias", gemm.n)
    if config.learned_positions:
        found["0.positions"] = _whole(scheme, "positions", "weight", config.learned_positions, config.hidden_size)
    return found


def _kernel(model: ModelSpec, checkpoint: str, width: int) -> dict[str, Any]:
    """Shape in which a convolution's weights are stored."""
    if checkpoint == "whisper_encoder":
        return {"kernel": (width // 3, 3), "taps_first": True}
    side = model.tokens.patch_pixels
    frames = () if checkpoint == "siglip" else (width // (3 * side * side),)
    return {"kernel": (3, *frames, side, side)}


def _whole(
    scheme: Scheme, ours: str, part: str, rows: int, width: int = 0, *, block: str = "", **kernel: Any
) -> Stored:
    (name,) = scheme.parts[ours]
    dot = "" if name.endswith(":") else "."
    return Stored((Rows(f"{block}{name}{dot}{part}", 0, rows),), width, **kernel)
