"""Encoders and language models of published configurations as modules of this suite, still without projectors."""

from typing import Any

from entrain_bench.base.errors import UserError, require, unknown_choice
from entrain_bench.config.hub.fields import Fields

IMAGE = ["image"]
AUDIO = ["audio"]
# Vision transformers with LayerNorm, biases and learned positions, all of whose fields have the same names.
IDEFICS = ("idefics2", "idefics2_vision", "idefics3", "idefics3_vision", "smolvlm_vision")
PLAIN = ("clip_vision_model", "siglip_vision_model", *IDEFICS, "phi4_multimodal_vision")
# Their field for a bias of queries, keys and values.
# Qwen-VL models that add outputs of several encoder layers to as many layers of the language model.
DEEPSTACK = ("qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe")
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
    """The vision transformer of a Qwen-VL from 2 to 3.5 with its mergers (several in "DeepStack")."""
    older = model_type == "qwen2_vl"
    gated = model_type == "qwen2_5_vl"
    names = ("embed_dim" if older else "hidden_size", "depth", "num_heads", "intermediate_size")
    width = fields.integer(names[0])
    merge = fields.integer("spatial_merge_size")
    out = fields.integer("hidden_size" if older else "out_hidden_size")
    merged = width * merge**2
    rows = 1 / merge**2
    stacked = model_type in DEEPSTACK or fields.values.get("deepstack_visual_indexes")
    mergers = 1 + (len(fields.integers("deepstack_visual_indexes")) if stacked else 0)
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


def glm_vision(fields: Fields) -> dict[str, Any]:
    """The vision transformer of GLM-4.1V and GLM-4.5V with its merger; its MLPs are as wide as its output."""
    width = fields.integer("hidden_size")
    out = fields.integer("out_hidden_size")
    middle = fields.integer("intermediate_size")
    merge = fields.integer("spatial_merge_size")
    rows = 1 / merge**2
    sizes = ((width * merge**2, out), (out, out), (out, 2 * middle), (middle, out))
    return encoder(
        fields,
        ("hidden_size", "depth", "num_heads", "out_hidden_size"),
        ["image", "video"],
        gated_mlp=True,
        qkv_bias=fields.flag("attention_bias"),
        embed_gemms=[patches(fields, width, "in_channels", fields.integer("temporal_patch_size"))],
        head_gemms=[product(k, n, rows) for k, n in sizes],
    )


def ernie_vision(fields: Fields, out: int) -> dict[str, Any]:
    """The vision transformer of ERNIE-4.5-VL with its resampler, which merges patches and pairs of frames."""
    width = fields.integer("hidden_size")
    merge = fields.integer("spatial_merge_size")
    merged = width * merge**2
    rows = 1 / merge**2
    sizes = ((merged, merged), (merged, merged), (2 * merged, merged), (merged, merged), (merged, out))
    ffn = _whole(fields, "mlp_ratio", width) if fields.values.get("mlp_ratio") else fields.integer("intermediate_size")
    return encoder(
        fields,
        ("hidden_size", "depth", "num_heads", "intermediate_size"),
        IMAGE,
        ffn,
        norm_bias=True,
        qkv_bias=True,
        linear_bias=True,
        embed_gemms=[patches(fields, width, "in_channels")],
        head_gemms=[product(k, n, rows) for k, n in sizes],
    )


def moon_vision(fields: Fields, out: int) -> dict[str, Any]:
    """MoonViT with its projector (Kimi-VL, Kimi-K2.5), whose fields its authors call ``vt_...`` in the latter."""
    prefix = "vt_" if "vt_hidden_size" in fields.values else ""
    names = tuple(f"{prefix}{name}" for name in NEWER_NAMES)
    width = fields.integer(names[0])
    merge = fields.integers("merge_kernel_size")
    merged = width * merge[0] * merge[-1]
    rows = 1 / (merge[0] * merge[-1])
    return encoder(
        fields,
        (names[0], names[1], names[2], names[3]),
        IMAGE,
        norm_bias=True,
        qkv_bias=True,
        linear_bias=True,
        embed_gemms=[product(3 * fields.square("patch_size") ** 2, width)],
        head_gemms=[product(merged, merged, rows), product(merged, out, rows)],
    )


def omni_audio(fields: Fields) -> dict[str, Any]:
    """The audio encoder of Qwen3-Omni: three convolutions of stride 2 in time and frequency, then blocks."""
    width = fields.integer("d_model")
    channels = fields.integer("downsample_hidden_size")
    bins = fields.integer("num_mel_bins")
    bands = [bins := -(-bins // 2) for _ in range(3)]
    # Rows of a token: frames by bands that each convolution leaves.
    inputs = (1, channels, channels)
    convolutions = [
        product(9 * k, channels, float(frames * left)) for k, frames, left in zip(inputs, (4, 2, 1), bands, strict=True)
    ]
    out = fields.integer("output_dim")
    return encoder(
        fields,
        OPENAI_NAMES,
        AUDIO,
        embed_gemms=[*convolutions, product(channels * bands[-1], width)],
        head_gemms=[product(width, width), product(width, out)],
        **LAYER_NORM,
    )


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


def head_dim(fields: Fields, width: int, heads: int) -> int:
    """Width of a head: as stated, or an equal share of the hidden size; ``UserError`` if that is no whole number."""
    if fields.get("head_dim") is not None:
        return fields.integer("head_dim")
    if width % heads:
        raise UserError(f"{fields.path}head_dim: missing in {fields.file}, and {heads} heads do not divide {width}")
    return width // heads
