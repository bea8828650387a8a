"""Configurations as published models have them, written by transformers' own classes, and what those make of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

QWEN25_7B = {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28} | {
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
}
QWEN_SIZES = {key: value for key, value in QWEN25_7B.items() if key != "model_type"}
SIGLIP = {"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304} | {
    "num_attention_heads": 16,
    "vision_use_head": False,
    "patch_size": 14,
}
LLAMA3_8B = {"model_type": "llama", "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128259} | {
    "max_position_embeddings": 10240
}


@dataclass(frozen=True)
class Case:
    """A model: its type, what its configuration states, its class, its image or audio processor, and its encoders."""

    model_type: str
    config: Mapping[str, Any]
    model: str
    processor: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[str, ...] = ("vision",)

    def write(self, folder: Path) -> Path:
        import transformers

        self.configuration().save_pretrained(folder)
        if self.processor:
            getattr(transformers, self.processor)(**self.options).save_pretrained(folder)
        elif self.options:
            (folder / "preprocessor_config.json").write_text(json.dumps(self.options))
        return folder

    def configuration(self) -> Any:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        return CONFIG_MAPPING[self.model_type](**self.config)

    def parameters(self) -> dict[str, int]:
        """Parameters of each part of the model that the class makes."""
        found, _ = self._counted()
        return found

    def expert_parameters(self) -> int:
        """Parameters of routed experts."""
        return self._counted()[1]

    def _counted(self) -> tuple[dict[str, int], int]:
        import torch
        import transformers

        with torch.device("meta"):
            model = getattr(transformers, self.model)(self.configuration())
        found: dict[str, int] = {}
        experts = 0
        for name, parameter in model.named_parameters():
            part = self._part(name)
            found[part] = found.get(part, 0) + parameter.numel()
            routed = ".experts." in name or ("block_sparse_moe" in name and "router" not in name)
            experts += parameter.numel() * routed
        return found, experts

    def _part(self, name: str) -> str:
        encoder = "vision" if "vision" in self.parts else "audio"
        words = {"audio": "audio", "visual": "vision", "vision": "vision", "image": "vision", "connector": "vision"}
        words |= dict.fromkeys(("multi_modal_projector", "mm_projector", "resampler_model"), encoder)
        if "language_model" in name:
            return "llm"
        return next((part for word, part in words.items() if word in name), "llm")


# Experts in place of MLPs.
QWEN3_30B = {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48} | {
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "mlp_only_layers": [],
}
DEEPSEEK_LITE = {"hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408} | {
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
}
MIXTURES: Mapping[str, Case] = {
    "qwen3_vl_30b_a3b": Case(
        "qwen3_vl_moe",
        {"vision_config": {"out_hidden_size": 2048}, "text_config": QWEN3_30B, "tie_word_embeddings": False},
        "Qwen3VLMoeForConditionalGeneration",
    ),
    "qwen3_vl_235b_a22b": Case(
        "qwen3_vl_moe",
        {
            "vision_config": {"out_hidden_size": 4096},
            "text_config": QWEN3_30B
            | {"hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536}
            | {"num_hidden_layers": 94, "num_attention_heads": 64},
            "tie_word_embeddings": False,
        },
        "Qwen3VLMoeForConditionalGeneration",
    ),
    "qwen3_omni_30b_a3b": Case(
        "qwen3_omni_moe_thinker",
        {
            "vision_config": {"out_hidden_size": 2048},
            "audio_config": {"output_dim": 2048},
            "text_config": QWEN3_30B | {"intermediate_size": 768, "vocab_size": 152064},
        },
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        "Qwen2VLImageProcessorPil",
        {"patch_size": 16, "size": {"shortest_edge": 3136, "longest_edge": 12845056}},
        ("vision", "audio"),
    ),
    "qwen3_5_35b_a3b": Case(
        "qwen3_5_moe", {"vision_config": {"out_hidden_size": 2048}}, "Qwen3_5MoeForConditionalGeneration"
    ),
    "glm_4_5v": Case(
        "glm4v_moe",
        {"vision_config": {"intermediate_size": 10944}, "text_config": {"head_dim": 128}},
        "Glm4vMoeForConditionalGeneration",
        "Glm4vImageProcessorPil",
        {"size": {"shortest_edge": 12544, "longest_edge": 9633792}},
    ),
    "kimi_k25": Case(
        "kimi_k25",
        {
            "text_config": {"model_type": "deepseek_v3", "num_attention_heads": 64, "num_key_value_heads": 64}
            | {"n_routed_experts": 384, "first_k_dense_replace": 1, "vocab_size": 163840},
            "tie_word_embeddings": False,
        },
        "Kimi_K25ForConditionalGeneration",
    ),
    "ernie_4_5_vl_28b_a3b": Case(
        "ernie4_5_vl_moe",
        {"text_config": {"moe_intermediate_size": [1536, 512]} | {"mlp_layer_types": ["dense", *["sparse"] * 27]}},
        "Ernie4_5_VLMoeForConditionalGeneration",
        "Ernie4_5_VLMoeImageProcessorPil",
    ),
    "qwen3_30b_a3b": Case("qwen3_moe", QWEN3_30B, "Qwen3MoeForCausalLM"),
    "qwen1_5_moe_a2_7b": Case("qwen2_moe", {"mlp_only_layers": []}, "Qwen2MoeForCausalLM"),
    "qwen3_next_80b_a3b": Case("qwen3_next", {}, "Qwen3NextForCausalLM"),
    "mixtral_8x7b": Case("mixtral", {}, "MixtralForCausalLM"),
    "deepseek_v3": Case("deepseek_v3", {}, "DeepseekV3ForCausalLM"),
    "deepseek_v2_lite": Case("deepseek_v2", DEEPSEEK_LITE, "DeepseekV2ForCausalLM"),
    "glm_4_5_air": Case("glm4_moe", {"head_dim": 128}, "Glm4MoeForCausalLM"),
    "llama4_scout": Case("llama4_text", {}, "Llama4ForCausalLM"),
    "gpt_oss_120b": Case("gpt_oss", {}, "GptOssForCausalLM"),
    "olmoe_7b": Case("olmoe", {}, "OlmoeForCausalLM"),
    "granite_moe": Case("granitemoe", {"intermediate_size": 512}, "GraniteMoeForCausalLM"),
    "ernie_4_5_21b_a3b": Case("ernie4_5_moe", {}, "Ernie4_5_MoeForCausalLM"),
    "aria_text": Case("aria_text", {"hidden_size": 2560, "intermediate_size": 1664}, "AriaTextForCausalLM"),
}
CASES: Mapping[str, Case] = {
    "qwen2_vl_7b": Case(
        "qwen2_vl",
        {"vision_config": {"hidden_size": 3584}, "text_config": {**QWEN_SIZES}},
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLImageProcessorPil",
        {"size": {"shortest_edge": 3136, "longest_edge": 12845056}},
    ),
    "qwen2_5_vl_7b": Case(
        "qwen2_5_vl",
        {"vision_config": {"hidden_size": 1280, "out_hidden_size": 3584}, "text_config": {**QWEN_SIZES}},
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2VLImageProcessorPil",
        {"size": {"shortest_edge": 3136, "longest_edge": 1003520}},
    ),
    "qwen3_vl_8b": Case(
        "qwen3_vl",
        {
            "vision_config": {"out_hidden_size": 4096},
            "text_config": {"intermediate_size": 12288, "num_hidden_layers": 36, "num_key_value_heads": 8}
            | {"max_position_embeddings": 262144},
        },
        "Qwen3VLForConditionalGeneration",
        "Qwen2VLImageProcessorPil",
        {"size": {"shortest_edge": 65536, "longest_edge": 16777216}, "patch_size": 16},
    ),
    "internvl3_8b": Case(
        "internvl",
        {"vision_config": {"attention_bias": True}, "text_config": {**QWEN25_7B}, "tie_word_embeddings": False},
        "InternVLForConditionalGeneration",
        "GotOcr2ImageProcessorPil",
        {"size": {"height": 448, "width": 448}, "crop_to_patches": True},
    ),
    "llava_1_5_7b": Case(
        "llava",
        {"text_config": {"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096}},
        "LlavaForConditionalGeneration",
        "CLIPImageProcessorPil",
        {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
    ),
    "llava_next_mistral_7b": Case(
        "llava_next",
        {"text_config": {"model_type": "mistral", "vocab_size": 32064, "sliding_window": None}},
        "LlavaNextForConditionalGeneration",
        "LlavaNextImageProcessorPil",
        {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
    ),
    "llava_onevision_7b": Case(
        "llava_onevision",
        {"text_config": {**QWEN25_7B}},
        "LlavaOnevisionForConditionalGeneration",
        "LlavaOnevisionImageProcessorPil",
    ),
    "gemma3_4b": Case(
        "gemma3",
        {
            "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
            | {"sliding_window": 1024},
            "vision_config": {**SIGLIP, "num_hidden_layers": 27, "image_size": 896},
        },
        "Gemma3ForConditionalGeneration",
        "Gemma3ImageProcessorPil",
        {"size": {"height": 896, "width": 896}},
    ),
    "smolvlm_2b": Case(
        "smolvlm",
        {
            "text_config": {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192}
            | {"num_hidden_layers": 24, "num_attention_heads": 32, "vocab_size": 49280}
            | {"max_position_embeddings": 8192},
            "vision_config": {"intermediate_size": 4304, "num_hidden_layers": 27, "image_size": 384, "patch_size": 14},
            "scale_factor": 3,
        },
        "SmolVLMForConditionalGeneration",
        "SmolVLMImageProcessorPil",
        {"size": {"longest_edge": 1536}, "max_image_size": {"longest_edge": 384}},
    ),
    "idefics3_8b": Case(
        "idefics3",
        {
            "text_config": {**LLAMA3_8B},
            "vision_config": {"intermediate_size": 4304, "num_hidden_layers": 27, "image_size": 364, "patch_size": 14},
        },
        "Idefics3ForConditionalGeneration",
        "Idefics3ImageProcessorPil",
        {"size": {"longest_edge": 1456}, "max_image_size": {"longest_edge": 364}},
    ),
    "idefics2_8b": Case(
        "idefics2",
        {
            "text_config": {"model_type": "mistral", "vocab_size": 32003, "max_position_embeddings": 32768},
            "vision_config": {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27}
            | {"num_attention_heads": 16, "image_size": 980, "patch_size": 14},
        },
        "Idefics2ForConditionalGeneration",
        "Idefics2ImageProcessorPil",
    ),
    "pixtral_12b": Case(
        "llava",
        {
            "vision_config": {"model_type": "pixtral"},
            "text_config": {"model_type": "mistral", "hidden_size": 5120, "head_dim": 128, "num_hidden_layers": 40}
            | {"vocab_size": 131072, "sliding_window": None},
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        "LlavaForConditionalGeneration",
        "PixtralImageProcessorPil",
        {"size": {"longest_edge": 1024}},
    ),
    "mistral_small_3_24b": Case(
        "mistral3",
        {"tie_word_embeddings": False},
        "Mistral3ForConditionalGeneration",
        "PixtralImageProcessorPil",
        {"size": {"longest_edge": 1540}, "patch_size": 14},
    ),
    "phi4_multimodal": Case(
        "phi4_multimodal",
        {},
        "Phi4MultimodalForCausalLM",
        # Its image processor needs torchvision.
        options={"size": {"height": 448, "width": 448}, "patch_size": 14, "dynamic_hd": 36},
        parts=("vision", "audio"),
    ),
    "qwen2_audio_7b": Case(
        "qwen2_audio",
        {"text_config": {"model_type": "qwen2", "intermediate_size": 11008, "vocab_size": 156032}},
        "Qwen2AudioForConditionalGeneration",
        "WhisperFeatureExtractor",
        {"feature_size": 128},
        ("audio",),
    ),
    "voxtral_mini_3b": Case("voxtral", {}, "VoxtralForConditionalGeneration", parts=("audio",)),
    "llama3_8b": Case("llama", {**LLAMA3_8B}, "LlamaForCausalLM"),
    "qwen2_5_05b": Case(
        "qwen2",
        {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
        | {"num_key_value_heads": 2, "tie_word_embeddings": True},
        "Qwen2ForCausalLM",
    ),
    "qwen3_4b": Case(
        "qwen3",
        {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_key_value_heads": 8}
        | {"tie_word_embeddings": True},
        "Qwen3ForCausalLM",
    ),
    "gemma2_2b": Case("gemma2", {}, "Gemma2ForCausalLM"),
    "phi3_mini": Case("phi3", {"sliding_window": 2047}, "Phi3ForCausalLM"),
    "starcoder2_3b": Case("starcoder2", {}, "Starcoder2ForCausalLM"),
    "qwen3_5_4b": Case(
        "qwen3_5",
        {
            "vision_config": {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 2560},
            "text_config": {"hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32}
            | {"num_attention_heads": 16, "num_key_value_heads": 4, "tie_word_embeddings": True},
            "tie_word_embeddings": True,
        },
        "Qwen3_5ForConditionalGeneration",
    ),
    "glm_4_1v_9b": Case("glm4v", {}, "Glm4vForConditionalGeneration"),
    **MIXTURES,
}
