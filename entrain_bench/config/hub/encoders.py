"""Encoders of published configurations as modules of this suite, still without what projects them to the LLM."""

from __future__ import annotations

from typing import Any

from entrain_bench.base.errors import UserError, require, unknown_choice
from entrain_bench.config.hub.decoder import head_dim
from entrain_bench.config.hub.fields import Fields

IMAGE = ["image"]
AUDIO = ["audio"]
# Vision transformers with LayerNorm, biases and learned positions, all of whose fields have the same names.
PLAIN = (
    "clip_vision_model",
    "siglip_vision_model",
    "idefics2",
    "idefics2_vision",
    "idefics3",
    "idefics3_vision",
    "smolvlm_vision",
    "phi4_multimodal_vision",
)
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
    """A vision transformer of fixed design: CLIP's, SigLIP's, Pixtral's or InternViT; without positions and pooling.

    Raises:
        UserError: for another design, and for fields that are missing or wrong.
    """
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
    """The vision transformer of Qwen2-VL, Qwen2.5-VL or Qwen3-VL, with its merger.

    The mergers of intermediate layers that Qwen3-VL adds ("DeepStack") are further products of the projector.
    """
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
    # Convolutions of width 3, the second with stride 2.
    convolutions = [product(3 * fields.integer("num_mel_bins"), width, 2.0), product(3 * width, width)]
    return encoder(fields, names, AUDIO, embed_gemms=convolutions, **LAYER_NORM)


def conformer(fields: Fields, names: Names, channels: int) -> dict[str, Any]:
    """The conformer of Phi-4-multimodal, with one MLP in place of two gated ones and the products between convolutions.

    Products have the same sizes in all, and a layer the same number of parameters except for norms and biases.
    ``channels`` are those of its first convolutions.
    """
    width = fields.integer(names[0])
    stride = fields.integer("time_reduction")
    require(stride == 8, fields.named("time_reduction"), stride, "8: three convolutions of stride 2")
    # Frequencies that three convolutions of stride 2 leave.
    bands = -(-fields.integer("input_size") // stride)
    # Convolutions of stride 2 in time and frequency, all but the first depthwise with a product behind.
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
