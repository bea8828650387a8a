"""Language models of published configurations as modules of this suite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from entrain_bench.base.errors import UserError, require, unknown_choice
from entrain_bench.config.hub.fields import Fields

FULL = "full_attention"
SLIDING = "sliding_attention"
# Fields of mixtures of experts, by several authors.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Layers of Gemma 3 of which the last attends in full, where a configuration does not list them.
GEMMA3_PATTERN = 6


@dataclass(frozen=True, slots=True)
class Family:
    """Properties of a ``model_type`` that its configurations do not state.

    Attributes:
        qkv_bias: whether queries, keys and values have a bias; None: ``attention_bias`` says so.
        biased: whether norms and all products may have one, as ``use_bias`` says; the MLP is then not gated.
        sliding: layers that attend in a window: ``all``, ``alternate`` ones, all but each sixth (``sixth``), those from
            ``max_window_layers`` on if ``use_sliding_window`` is true (``late``), or none (empty).
    """

    qkv_bias: bool | None = None
    biased: bool = False
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
    """The module of a decoder.

    Args:
        fields: of its configuration.
        model_type: of the decoder.
        tied: whether it shares input and output embeddings.

    Raises:
        UserError: for a decoder that is no stack of equal dense blocks, and for fields that are missing or wrong.
    """
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
    """The window of layers that do not attend in full, and which do; nothing if all do."""
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
        for kind in listed:
            if kind not in (FULL, SLIDING):
                raise unknown_choice(fields.named("layer_types"), str(kind), (FULL, SLIDING))
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
