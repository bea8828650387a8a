"""Encoders and language models of published configurations as modules of this suite, still without projectors."""

from dataclasses import dataclass
from typing import Any

from entrain_bench.base.errors import UserError, require, unknown_choice
from entrain_bench.config.hub.fields import Fields

IMAGE = ["image"]
AUDIO = ["audio"]
# Vision transformers with LayerNorm, biases and learned positions, all of whose fields have the same names.
IDEFICS = ("idefics2", "idefics2_vision", "idefics3", "idefics3_vision", "smolvlm_vision")
PLAIN = ("clip_vision_model", "siglip_vision_model", *IDEFICS, "phi4_multimodal_vision")
# Their field for a bias of queries, keys and values.
INTERNVIT = {"internvl_vision": "attention_bias", "intern_vit_6b": "qkv_bias"}


type Names = tuple[str, str, str, str]

# Names of the fields for width, layers, heads and feed-forward width: in newer configurations, in a Whisper encoder's
# own, and of a conformer in transformers and in Phi-4-multimodal's own.
NEWER_NAMES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
OPENAI_NAMES = ("d_model", "encoder_layers", "encoder_attention_heads", "encoder_ffn_dim")
CONFORMER_NAMES = ("hidden_size", "num_blocks", "num_attention_heads", "intermediate_size")
PHI4MM_NAMES = ("attention_dim", "num_blocks", "attention_heads", "linear_units")
# Values of encoders with LayerNorm and learned positions.
LAYER_NORM = {"rotary": False, "norm_bias": True, "qkv_bias": True, "linear_bias": True}


def encoder(
    fields: Fields, names: Names, modalities: list[str], ffn: int | None = None, **others: Any
) -> dict[str, Any]:
    """An encoder with full attention; ``others`` are further keys of its module."""
    width, layers, heads = (fields.integer(name) for name in names[:3])
    return {
        "role": "encoder",
        "modalities": modalities,
        "num_layers": layers,
        "hidden_size": width,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": head_dim(fields, width, heads),
        "ffn_hidden_size": fields.integer(names[3]) if ffn is None else ffn,
        **others,
    }


def vision_encoder(fields: Fields, default_type: str) -> dict[str, Any]:
    """A vision transformer without positions and pooling; ``UserError`` for other designs or wrong fields."""
    kind = str(fields.get("model_type") or default_type)
    others: dict[str, bool] = LAYER_NORM
    if kind == "pixtral":
        others = {"gated_mlp": True}
    elif kind in INTERNVIT:
        fields.refuse("use_mask_token", "masked images are not supported")
        others = LAYER_NORM | {"qkv_bias": fields.flag(INTERNVIT[kind])}
    elif kind not in PLAIN:
        raise unknown_choice(f"{fields.path}model_type", kind, [*PLAIN, "pixtral", *INTERNVIT])
    width = fields.integer("hidden_size")
    return encoder(fields, NEWER_NAMES, IMAGE, embed_gemms=[patches(fields, width, "num_channels")], **others)


def qwen_vision(fields: Fields, model_type: str) -> dict[str, Any]:
    """The vision transformer of Qwen2-VL, Qwen2.5-VL or Qwen3-VL with its mergers (several in "DeepStack")."""
    older = model_type == "qwen2_vl"
    gated = model_type == "qwen2_5_vl"
    names = ("embed_dim" if older else "hidden_size", "depth", "num_heads", "intermediate_size")
    width = fields.integer(names[0])
    merge = fields.integer("spatial_merge_size")
    out = fields.integer("hidden_size" if older else "out_hidden_size")
    merged = width * merge**2
    rows = 1 / merge**2
    mergers = 1 + (len(fields.integers("deepstack_visual_indexes")) if model_type == "qwen3_vl" else 0)
    products = [product(merged, merged, rows), product(merged, out, rows)]
    found = encoder(
        fields,
        names,
        ["image", "video"],
        _whole(fields, "mlp_ratio", width) if older else None,
        gated_mlp=gated,
        norm_bias=not gated,
        qkv_bias=True,
        linear_bias=True,
        embed_gemms=[patches(fields, width, "in_channels", fields.integer("temporal_patch_size"))],
        head_gemms=products * mergers,
    )
    if gated:
        side = fields.integer("window_size") // fields.square("patch_size")
        found |= {"window_tokens": side**2, "full_attention_layers": fields.integers("fullatt_block_indexes")}
    return found


def whisper(fields: Fields, names: Names) -> dict[str, Any]:
    """Whisper's encoder, by the names of its fields."""
    width = fields.integer(names[0])
    convolutions = [product(3 * fields.integer("num_mel_bins"), width, 2.0), product(3 * width, width)]
    return encoder(fields, names, AUDIO, embed_gemms=convolutions, **LAYER_NORM)


def conformer(fields: Fields, names: Names, channels: int) -> dict[str, Any]:
    """The conformer of Phi-4-multimodal by products of the same size; its first convolutions have ``channels``."""
    width = fields.integer(names[0])
    stride = fields.integer("time_reduction")
    require(stride == 8, fields.named("time_reduction"), stride, "8: three convolutions of stride 2")
    # Frequencies that three convolutions of stride 2 leave.
    bands = -(-fields.integer("input_size") // stride)
    # Convolutions of stride 2 in time and frequency; all except the first are depthwise, followed by a product.
    convolutions = [
        product(9, channels, 4.0 * 4 * bands),
        product(channels, channels, 2.0 * 2 * bands),
        product(channels, channels, float(bands)),
        product(channels * bands, width),
    ]
    # Gated ones have 6 x width x ffn parameters, convolutions 4 x width x width, this one 2 x width x its own.
    ffn = 3 * fields.integer(names[3]) + 2 * width
    return encoder(fields, names, AUDIO, ffn, embed_gemms=convolutions, **LAYER_NORM)


def product(k: int, n: int, rows_per_token: float = 1.0) -> dict[str, Any]:
    """A product ``[rows, k] @ [k, n]`` as the configuration of a module states it."""
    return {"k": k, "n": n, "rows_per_token": rows_per_token}


def patches(fields: Fields, width: int, channels: str, frames: int = 1) -> dict[str, Any]:
    """The product that embeds patches."""
    return product(fields.integer(channels) * frames * fields.square("patch_size") ** 2, width)


def _whole(fields: Fields, name: str, times: int) -> int:
    value = fields.number(name) * times
    if value != int(value):
        raise UserError(f"{fields.named(name)}={fields.get(name)}: must make a whole number of {times}")
    return int(value)


FULL, SLIDING = ATTENTION_TYPES = ("full_attention", "sliding_attention")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Layers of Gemma 3 of which the last attends in full, where a configuration does not list them.
GEMMA3_PATTERN = 6


@dataclass(frozen=True, slots=True)
class Family:
    """Properties of a ``model_type`` that its configurations do not state."""

    qkv_bias: bool | None = None  # of queries, keys and values; None: ``attention_bias`` says so
    biased: bool = False  # norms and all products may have a bias, as ``use_bias`` says; the MLP is then not gated
    # Layers that attend in a window: ``all``, ``alternate`` ones, all except each sixth (``sixth``), those from
    # ``max_window_layers`` on if ``use_sliding_window`` is true (``late``), or none (empty).
    sliding: str = ""


FAMILIES = {
    "llama": Family(),
    "mistral": Family(qkv_bias=False, sliding="all"),
    "ministral": Family(qkv_bias=False, sliding="all"),
    "qwen2": Family(qkv_bias=True, sliding="late"),
    "qwen2_vl_text": Family(qkv_bias=True, sliding="late"),
    "qwen2_5_vl_text": Family(qkv_bias=True, sliding="late"),
    "qwen3": Family(sliding="late"),
    "qwen3_vl_text": Family(),
    "gemma": Family(),
    "gemma2": Family(sliding="alternate"),
    "gemma3_text": Family(sliding="sixth"),
    "phi3": Family(qkv_bias=False, sliding="all"),
    "phi4_multimodal": Family(qkv_bias=False, sliding="all"),
    "smollm3": Family(),
    "olmo2": Family(),
    "starcoder2": Family(biased=True, sliding="all"),
    "internlm2": Family(qkv_bias=False),
}


def language_model(fields: Fields, model_type: str, tied: bool) -> dict[str, Any]:
    """A decoder, maybe with ``tied`` embeddings; ``UserError`` unless it is a stack of equal dense blocks."""
    if model_type not in FAMILIES:
        raise unknown_choice(f"{fields.path}model_type", model_type, FAMILIES)
    for name in EXPERTS:
        fields.refuse(name, "mixtures of experts are not supported; use a dense model")
    family = FAMILIES[model_type]
    heads = fields.integer("num_attention_heads")
    width = fields.integer("hidden_size")
    biased = family.biased and fields.flag("use_bias")
    return {
        "role": "llm",
        "num_layers": fields.integer("num_hidden_layers"),
        "hidden_size": width,
        "num_heads": heads,
        "num_kv_heads": fields.integer("num_key_value_heads") if fields.get("num_key_value_heads") else heads,
        "head_dim": head_dim(fields, width, heads),
        "ffn_hidden_size": fields.integer("intermediate_size"),
        "gated_mlp": not family.biased,
        "norm_bias": family.biased,
        "qkv_bias": biased or (fields.flag("attention_bias") if family.qkv_bias is None else family.qkv_bias),
        "linear_bias": biased,
        "vocab_size": fields.integer("vocab_size"),
        "tied_embeddings": tied,
        "context_tokens": fields.integer("max_position_embeddings"),
        **_windows(fields, family),
    }


def head_dim(fields: Fields, width: int, heads: int) -> int:
    """Width of a head: as stated, or an equal share of the hidden size; ``UserError`` if that is no whole number."""
    if fields.get("head_dim") is not None:
        return fields.integer("head_dim")
    if width % heads:
        raise UserError(f"{fields.path}head_dim: missing in {fields.file}, and {heads} heads do not divide {width}")
    return width // heads


def _windows(fields: Fields, family: Family) -> dict[str, Any]:
    layers = fields.integer("num_hidden_layers")
    window = fields.get("sliding_window")
    full = _full_layers(fields, family, layers)
    if not window or len(full) == layers or window >= fields.integer("max_position_embeddings"):
        return {}
    return {"window_tokens": fields.integer("sliding_window"), "full_attention_layers": full}


def _full_layers(fields: Fields, family: Family, layers: int) -> list[int]:
    listed = fields.get("layer_types")
    if listed is not None:
        fits = isinstance(listed, list) and len(listed) == layers
        require(fits, fields.named("layer_types"), listed, f"a list of {layers} kinds ({fields.file})")
        if unknown := [str(kind) for kind in listed if kind not in ATTENTION_TYPES]:
            raise unknown_choice(fields.named("layer_types"), unknown[0], ATTENTION_TYPES)
        return [index for index, kind in enumerate(listed) if kind == FULL]
    if family.sliding == "all":
        return []
    if family.sliding == "alternate":
        return [*range(1, layers, 2)]
    if family.sliding == "sixth":
        stated = fields.get("sliding_window_pattern") or fields.get("_sliding_window_pattern") or GEMMA3_PATTERN
        every = Fields({"sliding_window_pattern": stated}, fields.file, fields.path).integer("sliding_window_pattern")
        return [*range(every - 1, layers, every)]
    if family.sliding == "late" and fields.flag("use_sliding_window"):
        return [*range(min(layers, fields.integer("max_window_layers", 0)))]
    return [*range(layers)]
