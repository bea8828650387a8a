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


def encoder(modalities: list[str], layers: int, width: int, heads: int, ffn: int, **others: Any) -> dict[str, Any]:
    """An encoder with full attention; ``others`` are further keys of its module."""
    return {
        "role": "encoder",
        "modalities": modalities,
        "num_layers": layers,
        "hidden_size": width,
        "num_heads": heads,
        "num_kv_heads": heads,
        "ffn_hidden_size": ffn,
        **others,
    }


def vision_encoder(fields: Fields, default_type: str = "clip_vision_model") -> dict[str, Any]:
    """A vision transformer of fixed design: CLIP's, SigLIP's, Pixtral's or InternViT.

    Raises:
        UserError: for another design, and for fields that are missing or wrong.
    """
    kind = str(fields.get("model_type") or default_type)
    if kind in PLAIN:
        return plain_vision(fields, qkv_bias=True)
    if kind == "pixtral":
        return pixtral(fields)
    if kind in ("internvl_vision", "intern_vit_6b"):
        fields.refuse("use_mask_token", "masked images are not supported")
        bias = fields.flag("qkv_bias") if kind == "intern_vit_6b" else fields.flag("attention_bias")
        return plain_vision(fields, qkv_bias=bias)
    raise unknown_choice(f"{fields.path}model_type", kind, [*PLAIN, "pixtral", "internvl_vision", "intern_vit_6b"])


def plain_vision(fields: Fields, qkv_bias: bool) -> dict[str, Any]:
    """A vision transformer with LayerNorm and biases, every layer of it; positions and pooling heads are left out."""
    return patch_transformer(fields, rotary=False, norm_bias=True, qkv_bias=qkv_bias, linear_bias=True)


def pixtral(fields: Fields) -> dict[str, Any]:
    """Pixtral's vision transformer: gated, with rotary positions and without biases."""
    return patch_transformer(fields, gated_mlp=True)


def patch_transformer(fields: Fields, **rest: bool) -> dict[str, Any]:
    """A vision transformer whose layers are alike, behind a product of patches; ``rest`` is what else they have."""
    width = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    return encoder(
        IMAGE,
        fields.integer("num_hidden_layers"),
        width,
        heads,
        fields.integer("intermediate_size"),
        head_dim=head_dim(fields, width, heads),
        embed_gemms=[patches(fields, width, "num_channels")],
        **rest,
    )


def qwen_vision(fields: Fields, model_type: str) -> dict[str, Any]:
    """The vision transformer of Qwen2-VL, Qwen2.5-VL or Qwen3-VL, with its merger.

    The mergers of intermediate layers that Qwen3-VL adds ("DeepStack") are further products of the projector.
    """
    width = fields.integer("embed_dim" if model_type == "qwen2_vl" else "hidden_size")
    heads = fields.integer("num_heads")
    merge = fields.integer("spatial_merge_size")
    out = fields.integer("hidden_size" if model_type == "qwen2_vl" else "out_hidden_size")
    gated = model_type == "qwen2_5_vl"
    ffn = _whole(fields, "mlp_ratio", width) if model_type == "qwen2_vl" else fields.integer("intermediate_size")
    merged = width * merge**2
    rows = 1 / merge**2
    mergers = 1 + (len(fields.integers("deepstack_visual_indexes")) if model_type == "qwen3_vl" else 0)
    products = [product(merged, merged, rows), product(merged, out, rows)]
    found = encoder(
        ["image", "video"],
        fields.integer("depth"),
        width,
        heads,
        ffn,
        head_dim=head_dim(fields, width, heads),
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


def whisper(fields: Fields, names: tuple[str, str, str, str]) -> dict[str, Any]:
    """Whisper's encoder, by the names of its fields for width, layers, heads and feed-forward width."""
    width, layers, heads, ffn = (fields.integer(name) for name in names)
    return encoder(
        AUDIO,
        layers,
        width,
        heads,
        ffn,
        head_dim=head_dim(fields, width, heads),
        rotary=False,
        norm_bias=True,
        qkv_bias=True,
        linear_bias=True,
        # Convolutions of width 3, the second with stride 2.
        embed_gemms=[product(3 * fields.integer("num_mel_bins"), width, 2.0), product(3 * width, width)],
    )


# Names of a Whisper encoder's fields in its own and in newer configurations.
OPENAI_NAMES = ("d_model", "encoder_layers", "encoder_attention_heads", "encoder_ffn_dim")
NEWER_NAMES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
# Names of a conformer's fields in transformers and in Phi-4-multimodal's own configuration.
CONFORMER_NAMES = ("hidden_size", "num_blocks", "num_attention_heads", "intermediate_size")
PHI4MM_NAMES = ("attention_dim", "num_blocks", "attention_heads", "linear_units")


def conformer(fields: Fields, names: tuple[str, str, str, str], channels: int) -> dict[str, Any]:
    """The conformer of Phi-4-multimodal, with one MLP in place of two gated ones and the products between convolutions.

    Products have the same sizes in all, and a layer the same number of parameters except for norms and biases.

    Args:
        fields: of its configuration.
        names: of its fields for width, layers, heads and feed-forward width.
        channels: of its first convolutions.
    """
    width, layers, heads, ffn = (fields.integer(name) for name in names)
    stride = fields.integer("time_reduction")
    require(stride == 8, fields.named("time_reduction"), stride, "8: three convolutions of stride 2")
    # Frequencies that three convolutions of stride 2 leave.
    bands = -(-fields.integer("input_size") // stride)
    return encoder(
        AUDIO,
        layers,
        width,
        heads,
        # Gated ones have 6 x width x ffn parameters, convolutions 4 x width x width, this one 2 x width x its own.
        3 * ffn + 2 * width,
        head_dim=head_dim(fields, width, heads),
        rotary=False,
        norm_bias=True,
        qkv_bias=True,
        linear_bias=True,
        # Convolutions of stride 2 in time and frequency, all but the first depthwise with a product behind.
        embed_gemms=[
            product(9, channels, 4.0 * 4 * bands),
            product(channels, channels, 2.0 * 2 * bands),
            product(channels, channels, float(bands)),
            product(channels * bands, width),
        ],
    )


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
