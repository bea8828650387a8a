"""Fields of a JSON file: typed, with the defaults of their class (transformers 5), and errors that name them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from entrain_bench.base.errors import UserError, require, unknown_choice

type Defaults = dict[str, Any]


def _decoder(width: int, ffn: int, layers: int, heads: int, vocabulary: int, context: int, **others: Any) -> Defaults:
    sizes = {"hidden_size": width, "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {**sizes, "vocab_size": vocabulary, "max_position_embeddings": context, **others}


def _vision(width: int, ffn: int, layers: int, heads: int, patch: int | list[int], **others: Any) -> Defaults:
    sizes = {"hidden_size": width, "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {**sizes, "num_channels": 3, "patch_size": patch, **others}


def _qwen_vision(width: int, depth: int, patch: int, **others: Any) -> Defaults:
    sizes = {"hidden_size": width, "depth": depth, "num_heads": 16, "in_channels": 3, "patch_size": patch}
    return {**sizes, "spatial_merge_size": 2, "temporal_patch_size": 2, **others}


def _whisper(width: int, layers: int, heads: int, ffn: int, mels: int) -> Defaults:
    sizes = {"d_model": width, "encoder_layers": layers, "encoder_attention_heads": heads, "encoder_ffn_dim": ffn}
    return {**sizes, "num_mel_bins": mels, "max_source_positions": 1500}


MISTRAL = _decoder(4096, 14336, 32, 32, 32000, 131072, num_key_value_heads=8, sliding_window=4096)
NO_WINDOW: Defaults = {"use_sliding_window": False, "max_window_layers": 28}
QWEN2 = _decoder(4096, 22016, 32, 32, 151936, 32768, num_key_value_heads=32, **NO_WINDOW)
QWEN2_VL = _decoder(8192, 29568, 80, 64, 152064, 32768, num_key_value_heads=8, **NO_WINDOW | {"max_window_layers": 80})
GEMMA: Defaults = {"head_dim": 256, "attention_bias": False, "tie_word_embeddings": True}
SMOLVLM = _vision(1152, 3072, 12, 16, 32, image_size=224)
LLAVA: Defaults = {"vision_feature_layer": -2, "vision_feature_select_strategy": "default"}
# By ``model_type``, of a whole model or of a part.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": _decoder(4096, 11008, 32, 32, 32000, 2048, attention_bias=False),
    "mistral": MISTRAL,
    "ministral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN2 | {"head_dim": 128, "attention_bias": False},
    "qwen2_vl_text": QWEN2_VL,
    "qwen2_5_vl_text": QWEN2_VL,
    "qwen3_vl_text": _decoder(4096, 22016, 32, 32, 151936, 128000, num_key_value_heads=32)
    | {"head_dim": 128, "attention_bias": False},
    "gemma": _decoder(3072, 24576, 28, 16, 256000, 8192, num_key_value_heads=16, **GEMMA),
    "gemma2": _decoder(2304, 9216, 26, 8, 256000, 8192, num_key_value_heads=4, sliding_window=4096, **GEMMA),
    "gemma3_text": _decoder(2304, 9216, 26, 8, 262208, 131072, num_key_value_heads=4, sliding_window=4096, **GEMMA),
    "phi3": _decoder(3072, 8192, 32, 32, 32064, 4096),
    "smollm3": _decoder(2048, 11008, 36, 16, 128256, 32768, num_key_value_heads=4, attention_bias=False)
    | {"use_sliding_window": False, "tie_word_embeddings": True},
    "olmo2": _decoder(4096, 11008, 32, 32, 50304, 2048, attention_bias=False),
    "starcoder2": _decoder(3072, 12288, 30, 24, 49152, 4096, num_key_value_heads=2)
    | {"use_bias": True, "tie_word_embeddings": True},
    "phi4_multimodal": _decoder(3072, 8192, 32, 32, 200064, 131072, num_key_value_heads=8),
    "clip_vision_model": _vision(768, 3072, 12, 12, 32, image_size=224),
    "siglip_vision_model": _vision(768, 3072, 12, 12, 16, image_size=224),
    "pixtral": _vision(1024, 4096, 24, 16, 16),
    "internvl_vision": _vision(1024, 4096, 24, 16, [14, 14], attention_bias=False),
    "idefics2_vision": _vision(768, 3072, 12, 12, 32, image_size=224),
    "idefics2_perceiver": {"hidden_size": 4096, "num_key_value_heads": 4, "resampler_n_latents": 64}
    | {"resampler_depth": 3, "resampler_n_heads": 16, "resampler_head_dim": 96},
    "idefics3_vision": SMOLVLM,
    "smolvlm_vision": SMOLVLM,
    "qwen2_vl_vision": _qwen_vision(3584, 32, 14, embed_dim=1280, mlp_ratio=4),
    "qwen2_5_vl_vision": _qwen_vision(3584, 32, 14, intermediate_size=3420, out_hidden_size=3584)
    | {"window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]},
    "qwen3_vl_vision": _qwen_vision(1152, 27, 16, intermediate_size=4304, out_hidden_size=3584)
    | {"deepstack_visual_indexes": [8, 16, 24]},
    "phi4_multimodal_vision": _vision(1152, 4304, 27, 16, 14, image_size=448, crop_size=448),
    "phi4_multimodal_audio": {"hidden_size": 1024, "intermediate_size": 1536, "num_blocks": 24}
    | {"num_attention_heads": 16, "input_size": 80, "time_reduction": 8, "nemo_conv_channels": 1024}
    | {"downsample_rate": 1},
    "qwen2_audio_encoder": _whisper(1280, 32, 20, 5120, 128),
    "voxtral_encoder": {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32}
    | {"num_attention_heads": 20, "num_mel_bins": 128, "max_source_positions": 1500},
    "whisper": _whisper(384, 4, 6, 1536, 80),
    "llava": LLAVA,
    "llava_next": LLAVA,
    "llava_onevision": {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    | {"vision_aspect_ratio": "anyres_max_9"},
    "mistral3": {"spatial_merge_size": 2, "vision_feature_layer": -1, "tie_word_embeddings": True},
    "gemma3": {"mm_tokens_per_image": 256, "tie_word_embeddings": True},
    "paligemma": {"projection_dim": 2048, "tie_word_embeddings": True},
    "idefics3": {"scale_factor": 2},
    "smolvlm": {"scale_factor": 2},
    "internvl": {"downsample_ratio": 0.5, "tie_word_embeddings": True},
}
# Sizes of a model, at most; those of a module have limits of their own.
MAX_FIELD = 2**31


@dataclass(frozen=True, slots=True)
class Fields:
    """A mapping of a file."""

    values: Mapping[str, Any]  # as the file states them
    file: str  # its name, for errors
    path: str = ""  # where in the file the mapping is, with a dot behind it; empty for the whole file
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of fields that the file leaves out

    def get(self, name: str) -> Any:
        """The value of a field, null included, or its default; None for neither."""
        return self.values[name] if name in self.values else self.defaults.get(name)

    def needed(self, name: str) -> Any:
        """The value of a field; ``UserError`` if there is none."""
        if (value := self.get(name)) is None:
            raise UserError(f"{self.path}{name}: missing in {self.file}")
        return value

    def integer(self, name: str, least: int = 1) -> int:
        """A whole number of at least ``least``; ``UserError`` otherwise."""
        value = self.needed(name)
        fits = isinstance(value, int) and not isinstance(value, bool) and least <= value <= MAX_FIELD
        require(fits, self.named(name), value, f"a whole number from {least} to {MAX_FIELD} ({self.file})")
        return int(value)

    def number(self, name: str) -> float:
        """A number above 0; ``UserError`` otherwise."""
        value = self.needed(name)
        fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MAX_FIELD
        require(fits, self.named(name), value, f"a number above 0 ({self.file})")
        return float(value)

    def flag(self, name: str) -> bool:
        """True or false, false where nothing is stated; ``UserError`` for anything else."""
        value = self.get(name)
        require(value is None or isinstance(value, bool), self.named(name), value, f"true or false ({self.file})")
        return bool(value)

    def choice(self, name: str, choices: Sequence[str]) -> str:
        """One of some words; ``UserError`` for another one."""
        value = self.needed(name)
        if value not in choices:
            raise unknown_choice(self.named(name), str(value), choices)
        return str(value)

    def square(self, name: str) -> int:
        """A side that is stated once, or twice as two equal ones; ``UserError`` for two that differ."""
        value = self.needed(name)
        if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
            return Fields({name: value[0]}, self.file, self.path).integer(name)
        return self.integer(name)

    def integers(self, name: str) -> list[int]:
        """Whole numbers of at least 0; ``UserError`` for anything else."""
        value = self.needed(name)
        fits = isinstance(value, list) and all(isinstance(one, int) and 0 <= one <= MAX_FIELD for one in value)
        require(fits, self.named(name), value, f"whole numbers ({self.file})")
        return [*value]

    def part(self, name: str, model_type: str = "") -> Fields:
        """A mapping of the file as fields, with the defaults of its ``model_type``, or else of the given one."""
        values = self.needed(name)
        require(isinstance(values, Mapping), self.named(name), values, f"a mapping ({self.file})")
        kind = values.get("model_type") or model_type
        return Fields(values, self.file, f"{self.path}{name}.", DEFAULTS.get(str(kind), {}))

    def part_as(self, name: str, model_type: str) -> Fields:
        """A mapping of the file with the defaults of a given type: older files state another one there."""
        return replace(self.part(name), defaults=DEFAULTS[model_type])

    def refuse(self, name: str, reason: str) -> None:
        """Raise ``UserError`` if a field states anything but nothing, zero or false."""
        if value := self.get(name):
            raise UserError(f"{self.named(name)}={value}: {reason}")

    def named(self, name: str) -> str:
        """A field with its path."""
        return f"{self.path}{name}"
