"""Language models of published configurations: decoders with MLPs or experts, and several kinds of attention."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from entrain_bench.base.errors import require, unknown_choice
from entrain_bench.config.hub.fields import Fields
from entrain_bench.config.hub.modules import head_dim

FULL = "full_attention"
SLIDING = "sliding_attention"
LINEAR = "linear_attention"
CHUNKED = "chunked_attention"
ATTENTION_TYPES = (FULL, SLIDING, LINEAR, CHUNKED)
# Numbers of experts, of which a model whose family has none may state none.
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Layers of Gemma 3 of which the last attends in full, where a configuration does not list them.
GEMMA3_PATTERN = 6


@dataclass(frozen=True, slots=True)
class ExpertFields:
    """Fields of a family's experts: their number, their width, and those that a token is sent to."""

    count: str
    width: str
    top_k: str = "num_experts_per_tok"
    # Width of shared experts in one field, or their number, each as wide as a routed one; empty: there are none.
    shared_width: str = ""
    shared_count: str = ""
    always_shared: bool = False  # one of a routed expert's width
    shared_gate: bool = False
    bias: bool = False
    dense: str = ""  # rule of the layers without experts (``DENSE``); empty: there are none
    dense_width: str = "intermediate_size"


@dataclass(frozen=True, slots=True)
class Family:
    """Properties of a ``model_type`` that its configurations do not state."""

    qkv_bias: bool | None = None  # of queries, keys and values; None: ``attention_bias`` says so
    biased: bool = False  # norms and all products may have a bias, as ``use_bias`` says; the MLP is then not gated
    # Layers that attend in a window: ``all``, ``alternate`` ones, all except each sixth (``sixth``), those from
    # ``max_window_layers`` on if ``use_sliding_window`` is true (``late``), or none (empty).
    sliding: str = ""
    experts: ExpertFields | None = None
    latent: bool = False  # multi-head latent attention
    linear: bool = False  # Gated DeltaNet in some layers, and gates on the output of the others


SPARSE_STEP = ExpertFields("num_experts", "moe_intermediate_size", dense="step")
SHARED_GATE = ExpertFields(
    "num_experts",
    "moe_intermediate_size",
    shared_width="shared_expert_intermediate_size",
    shared_gate=True,
    dense="step",
)
FIRST_DENSE = ExpertFields("n_routed_experts", "moe_intermediate_size", shared_count="n_shared_experts", dense="first")
ERNIE = ExpertFields(
    "moe_num_experts", "moe_intermediate_size", "moe_k", shared_count="moe_num_shared_experts", dense="from_to"
)
LOCAL = ExpertFields("num_local_experts", "intermediate_size")
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
    "glm4v_text": Family(qkv_bias=True),
    "qwen3_5_text": Family(linear=True),
    "qwen2_moe": Family(qkv_bias=True, sliding="late", experts=SHARED_GATE),
    "qwen3_moe": Family(sliding="late", experts=SPARSE_STEP),
    "qwen3_vl_moe_text": Family(experts=SPARSE_STEP),
    "qwen3_omni_moe_text": Family(experts=SPARSE_STEP),
    "qwen3_next": Family(experts=SHARED_GATE, linear=True),
    "qwen3_5_moe_text": Family(
        experts=ExpertFields(
            "num_experts", "moe_intermediate_size", shared_width="shared_expert_intermediate_size", shared_gate=True
        ),
        linear=True,
    ),
    "deepseek_v2": Family(experts=FIRST_DENSE, latent=True),
    "deepseek_v3": Family(experts=FIRST_DENSE, latent=True),
    "kimi_k2": Family(experts=FIRST_DENSE, latent=True),
    "glm4_moe": Family(experts=FIRST_DENSE),
    "glm4v_moe_text": Family(experts=FIRST_DENSE),
    "mixtral": Family(qkv_bias=False, sliding="all", experts=LOCAL),
    "granitemoe": Family(experts=LOCAL),
    "olmoe": Family(experts=ExpertFields("num_experts", "intermediate_size")),
    "gpt_oss": Family(
        qkv_bias=True, sliding="alternate", experts=ExpertFields("num_local_experts", "intermediate_size", bias=True)
    ),
    "llama4_text": Family(
        experts=ExpertFields(
            "num_local_experts",
            "intermediate_size",
            always_shared=True,
            dense="interleaved",
            dense_width="intermediate_size_mlp",
        ),
    ),
    "aria_text": Family(
        experts=ExpertFields("moe_num_experts", "intermediate_size", "moe_topk", shared_count="moe_num_shared_experts")
    ),
    "ernie4_5_moe": Family(qkv_bias=False, experts=ERNIE),
    "ernie4_5_vl_moe_text": Family(qkv_bias=False, experts=ERNIE),
}


def language_model(fields: Fields, model_type: str, tied: bool) -> dict[str, Any]:
    """A decoder, maybe with ``tied`` embeddings; ``UserError`` names a field of one that is not supported."""
    if model_type not in FAMILIES:
        raise unknown_choice(f"{fields.path}model_type", model_type, FAMILIES)
    family = FAMILIES[model_type]
    layers = fields.integer("num_hidden_layers")
    mixture = None if family.experts is None else experts(fields, family.experts, layers)
    if mixture is None:
        for name in COUNTS:
            fields.refuse(name, f"model_type={model_type} has no experts here; use that of the mixture")
    heads = fields.integer("num_attention_heads")
    width = fields.integer("hidden_size")
    biased = family.biased and fields.flag("use_bias")
    found = {
        "role": "llm",
        "num_layers": layers,
        "hidden_size": width,
        "num_heads": heads,
        "num_kv_heads": _key_value_heads(fields, heads),
        "ffn_hidden_size": 0,
        "gated_mlp": not family.biased,
        "norm_bias": family.biased,
        "qkv_bias": biased or (fields.flag("attention_bias") if family.qkv_bias is None else family.qkv_bias),
        "linear_bias": biased,
        "vocab_size": fields.integer("vocab_size"),
        "tied_embeddings": tied,
        "context_tokens": fields.integer("max_position_embeddings"),
        **(_latent(fields) if family.latent else {"head_dim": head_dim(fields, width, heads)}),
        **_windows(fields, family, layers),
    }
    if family.linear:
        found |= {"gated_attention": True, "linear_attention": _linear(fields, layers)}
    if mixture is not None:
        found["experts"] = mixture
    if mixture is None or mixture["dense_layers"]:
        name = "intermediate_size" if family.experts is None else family.experts.dense_width
        found["ffn_hidden_size"] = fields.integer(name)
    return found


def experts(fields: Fields, names: ExpertFields, layers: int) -> dict[str, Any]:
    """The experts of a decoder, as a module's YAML has them."""
    # transformers 5 writes another of these names than published files have.
    stated = next((name for name in COUNTS if name in fields.values), names.count)
    count, *visual_counts = _by_modality(fields, stated)
    width, *visual_widths = _by_modality(fields, names.width)
    visual: dict[str, Any] = {}
    if visual_widths:
        # Fields of one number are those of either modality.
        visual = {"visual_count": [count, *visual_counts][-1], "visual_ffn_hidden_size": visual_widths[0]}
    shared = width * names.always_shared
    if names.shared_width:
        shared = fields.integer(names.shared_width, 0)
    elif names.shared_count and fields.needed(names.shared_count):
        shared = width * fields.integer(names.shared_count)
    return {
        "count": count,
        "top_k": fields.integer(names.top_k),
        "ffn_hidden_size": width,
        "shared_ffn_hidden_size": shared,
        "shared_gate": names.shared_gate,
        "bias": names.bias,
        **visual,
        "dense_layers": DENSE[names.dense](fields, layers) if names.dense else [],
    }


def _by_modality(fields: Fields, name: str) -> list[int]:
    """A number, or those of text and of images, where experts have a modality of their own."""
    stated = fields.needed(name)
    if not isinstance(stated, list):
        return [fields.integer(name)]
    require(len(stated) == 2, fields.named(name), stated, f"one number, or those of text and images ({fields.file})")
    return [Fields({name: one}, fields.file, fields.path).integer(name) for one in stated]


def _first(fields: Fields, layers: int) -> list[int]:
    step = fields.get("moe_layer_freq")
    require(step in (None, 1), fields.named("moe_layer_freq"), step, f"1 ({fields.file})")
    return [*range(min(layers, fields.integer("first_k_dense_replace", 0)))]


def _step(fields: Fields, layers: int) -> list[int]:
    listed = fields.integers("mlp_only_layers") if fields.get("mlp_only_layers") else []
    step = fields.integer("decoder_sparse_step")
    return [index for index in range(layers) if index in listed or (index + 1) % step]


def _interleaved(fields: Fields, layers: int) -> list[int]:
    if fields.get("moe_layers"):
        return [index for index in range(layers) if index not in fields.integers("moe_layers")]
    step = fields.integer("interleave_moe_layer_step")
    return [index for index in range(layers) if (index + 1) % step]


def _from_to(fields: Fields, layers: int) -> list[int]:
    if (kinds := fields.get("mlp_layer_types")) is not None:
        return [index for index, kind in enumerate(kinds) if kind == "dense"]
    first = fields.needed("moe_layer_start_index")
    # The bounds of text's experts, those of images' end one layer earlier.
    first = max(first) if isinstance(first, list) else fields.integer("moe_layer_start_index", 0)
    last = fields.get("moe_layer_end_index")
    last = max(last) if isinstance(last, list) else last
    end = layers if last in (None, -1) else int(last) + 1
    step = fields.get("moe_layer_interval")
    require(step in (None, 1), fields.named("moe_layer_interval"), step, f"1 ({fields.file})")
    return [index for index in range(layers) if not first <= index < end]


# Layers without experts: the first ones, all except each n-th, all except listed ones, those outside a range.
DENSE: Mapping[str, Callable[[Fields, int], list[int]]] = {
    "first": _first,
    "step": _step,
    "interleaved": _interleaved,
    "from_to": _from_to,
}


def _key_value_heads(fields: Fields, heads: int) -> int:
    if fields.values.get("num_key_value_heads") is None and fields.defaults.get("num_key_value_heads") is None:
        return heads
    return fields.integer("num_key_value_heads")


def _latent(fields: Fields) -> dict[str, Any]:
    own = fields.integer("qk_nope_head_dim")
    shared = fields.integer("qk_rope_head_dim")
    compressed = "q_lora_rank" in fields.values and fields.values["q_lora_rank"] is None
    latent = {
        "query_rank": 0 if compressed else fields.integer("q_lora_rank"),
        "key_value_rank": fields.integer("kv_lora_rank"),
        "nope_head_dim": own,
        "rope_head_dim": shared,
        "value_head_dim": fields.integer("v_head_dim"),
    }
    return {"head_dim": own + shared, "latent": latent}


def _linear(fields: Fields, layers: int) -> dict[str, Any]:
    listed = fields.get("layer_types")
    if listed is None:
        every = fields.integer("full_attention_interval")
        linear = [index for index in range(layers) if (index + 1) % every]
    else:
        linear = [index for index, kind in enumerate(_listed_types(fields, layers)) if kind == LINEAR]
    return {
        "layers": linear,
        "num_key_heads": fields.integer("linear_num_key_heads"),
        "num_value_heads": fields.integer("linear_num_value_heads"),
        "key_head_dim": fields.integer("linear_key_head_dim"),
        "value_head_dim": fields.integer("linear_value_head_dim"),
        "kernel_tokens": fields.integer("linear_conv_kernel_dim"),
    }


def _windows(fields: Fields, family: Family, layers: int) -> dict[str, Any]:
    name = "attention_chunk_size" if fields.get("attention_chunk_size") else "sliding_window"
    window = fields.get(name)
    full = _full_layers(fields, family, layers)
    if not window or len(full) == layers or window >= fields.integer("max_position_embeddings"):
        return {}
    return {"window_tokens": fields.integer(name), "full_attention_layers": full}


def _listed_types(fields: Fields, layers: int) -> list[str]:
    listed = fields.get("layer_types")
    fits = isinstance(listed, list) and len(listed) == layers
    require(fits, fields.named("layer_types"), listed, f"a list of {layers} kinds ({fields.file})")
    if unknown := [str(kind) for kind in listed if kind not in ATTENTION_TYPES]:
        raise unknown_choice(fields.named("layer_types"), unknown[0], ATTENTION_TYPES)
    return [*map(str, listed)]


def _full_layers(fields: Fields, family: Family, layers: int) -> list[int]:
    if fields.get("layer_types") is not None:
        listed = _listed_types(fields, layers)
        if LINEAR in listed and not family.linear:
            raise unknown_choice(fields.named("layer_types"), LINEAR, [FULL, SLIDING, CHUNKED])
        return [index for index, kind in enumerate(listed) if kind in (FULL, LINEAR)]
    if fields.get("attention_chunk_size"):
        return _layers_without_rope(fields, layers)
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


def _layers_without_rope(fields: Fields, layers: int) -> list[int]:
    """Layers of Llama 4 without rotary positions, which attend in full."""
    listed = fields.get("no_rope_layers")
    if listed:
        return [index for index, rotates in enumerate(fields.integers("no_rope_layers")) if not rotates]
    every = fields.integer("no_rope_layer_interval")
    return [*range(every - 1, layers, every)]
