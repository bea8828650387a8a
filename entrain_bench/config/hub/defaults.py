"""Values that configurations leave out because they are the defaults of transformers' classes (version 5)."""

from collections.abc import Mapping
from typing import Any

# By ``model_type``, of a whole model or of a part.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"vocab_size": 32000, "max_position_embeddings": 2048, "attention_bias": False},
    "mistral": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 131072, "sliding_window": 4096},
    "ministral": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 131072, "sliding_window": 4096},
    "qwen2": {"hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"num_key_value_heads": 32, "vocab_size": 151936, "max_position_embeddings": 32768}
    | {"use_sliding_window": False, "max_window_layers": 28},
    "qwen3": {"hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"num_key_value_heads": 32, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 32768}
    | {"attention_bias": False, "use_sliding_window": False, "max_window_layers": 28},
    "qwen2_vl_text": {"hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80}
    | {"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 152064, "max_position_embeddings": 32768}
    | {"use_sliding_window": False, "max_window_layers": 80},
    "qwen2_5_vl_text": {"hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80}
    | {"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 152064, "max_position_embeddings": 32768}
    | {"use_sliding_window": False, "max_window_layers": 80},
    "qwen3_vl_text": {"hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32}
    | {"num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "vocab_size": 151936}
    | {"max_position_embeddings": 128000, "attention_bias": False},
    "gemma": {"hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28, "num_attention_heads": 16}
    | {"num_key_value_heads": 16, "head_dim": 256, "vocab_size": 256000, "max_position_embeddings": 8192}
    | {"attention_bias": False, "tie_word_embeddings": True},
    "gemma2": {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8}
    | {"num_key_value_heads": 4, "head_dim": 256, "vocab_size": 256000, "max_position_embeddings": 8192}
    | {"attention_bias": False, "tie_word_embeddings": True, "sliding_window": 4096},
    "gemma3_text": {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8}
    | {"num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208, "max_position_embeddings": 131072}
    | {"attention_bias": False, "tie_word_embeddings": True, "sliding_window": 4096},
    "phi3": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"vocab_size": 32064, "max_position_embeddings": 4096},
    "smollm3": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16}
    | {"num_key_value_heads": 4, "vocab_size": 128256, "max_position_embeddings": 32768, "attention_bias": False}
    | {"use_sliding_window": False, "tie_word_embeddings": True},
    "olmo2": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"vocab_size": 50304, "max_position_embeddings": 2048, "attention_bias": False},
    "starcoder2": {"hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 30, "num_attention_heads": 24}
    | {"num_key_value_heads": 2, "vocab_size": 49152, "max_position_embeddings": 4096, "use_bias": True}
    | {"tie_word_embeddings": True},
    "clip_vision_model": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12}
    | {"num_attention_heads": 12, "num_channels": 3, "image_size": 224, "patch_size": 32},
    "siglip_vision_model": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12}
    | {"num_attention_heads": 12, "num_channels": 3, "image_size": 224, "patch_size": 16},
    "pixtral": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
    | {"num_attention_heads": 16, "num_channels": 3, "patch_size": 16},
    "internvl_vision": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
    | {"num_attention_heads": 16, "attention_bias": False, "num_channels": 3, "patch_size": [14, 14]},
    "idefics2_vision": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12}
    | {"num_attention_heads": 12, "num_channels": 3, "image_size": 224, "patch_size": 32},
    "idefics2_perceiver": {"hidden_size": 4096, "num_key_value_heads": 4, "resampler_n_latents": 64}
    | {"resampler_depth": 3, "resampler_n_heads": 16, "resampler_head_dim": 96},
    "idefics3_vision": {"hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 12}
    | {"num_attention_heads": 16, "num_channels": 3, "image_size": 224, "patch_size": 32},
    "smolvlm_vision": {"hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 12}
    | {"num_attention_heads": 16, "num_channels": 3, "image_size": 224, "patch_size": 32},
    "qwen2_vl_vision": {"embed_dim": 1280, "depth": 32, "mlp_ratio": 4, "num_heads": 16, "in_channels": 3}
    | {"hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
    "qwen2_5_vl_vision": {"hidden_size": 3584, "intermediate_size": 3420, "depth": 32, "num_heads": 16}
    | {"in_channels": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 3584}
    | {"window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]},
    "qwen3_vl_vision": {"hidden_size": 1152, "intermediate_size": 4304, "depth": 27, "num_heads": 16}
    | {"in_channels": 3, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 3584}
    | {"deepstack_visual_indexes": [8, 16, 24]},
    "phi4_multimodal_vision": {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27}
    | {"num_attention_heads": 16, "num_channels": 3, "image_size": 448, "patch_size": 14, "crop_size": 448},
    "phi4_multimodal_audio": {"hidden_size": 1024, "intermediate_size": 1536, "num_blocks": 24}
    | {"num_attention_heads": 16, "input_size": 80, "time_reduction": 8, "nemo_conv_channels": 1024}
    | {"downsample_rate": 1},
    "qwen2_audio_encoder": {"d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20}
    | {"encoder_ffn_dim": 5120, "num_mel_bins": 128, "max_source_positions": 1500},
    "voxtral_encoder": {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32}
    | {"num_attention_heads": 20, "num_mel_bins": 128, "max_source_positions": 1500},
    "whisper": {"d_model": 384, "encoder_layers": 4, "encoder_attention_heads": 6, "encoder_ffn_dim": 1536}
    | {"num_mel_bins": 80, "max_source_positions": 1500},
    "llava": {"vision_feature_layer": -2, "vision_feature_select_strategy": "default"},
    "llava_next": {"vision_feature_layer": -2, "vision_feature_select_strategy": "default"},
    "llava_onevision": {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    | {"vision_aspect_ratio": "anyres_max_9"},
    "mistral3": {"spatial_merge_size": 2, "vision_feature_layer": -1, "tie_word_embeddings": True},
    "gemma3": {"mm_tokens_per_image": 256, "tie_word_embeddings": True},
    "paligemma": {"projection_dim": 2048, "tie_word_embeddings": True},
    "idefics3": {"scale_factor": 2},
    "smolvlm": {"scale_factor": 2},
    "internvl": {"downsample_ratio": 0.5, "tie_word_embeddings": True},
    "phi4_multimodal": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 200064, "max_position_embeddings": 131072},
}
