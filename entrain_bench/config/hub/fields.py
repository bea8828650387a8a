"""Fields of a JSON file: typed, with the defaults of their class (transformers 5), and errors that name them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from entrain_bench.base.errors import UserError, require, unknown_choice

type Defaults = dict[str, Any]


def _values(names: Sequence[str], *values: Any, **others: Any) -> Defaults:
    return dict(zip(names, values, strict=True)) | others


NEWER = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
DECODER = (*NEWER, "vocab_size", "max_position_embeddings")
VISION = (*NEWER, "patch_size", "num_channels")
QWEN_NAMES = ("hidden_size", "depth", "patch_size", "num_heads", "in_channels")
QWEN_VISION = (*QWEN_NAMES, "spatial_merge_size", "temporal_patch_size")
WHISPER = ("d_model", "encoder_layers", "encoder_attention_heads", "encoder_ffn_dim", "num_mel_bins")
MISTRAL = _values(DECODER, 4096, 14336, 32, 32, 32000, 131072, num_key_value_heads=8, sliding_window=4096)
NO_WINDOW: Defaults = {"use_sliding_window": False, "max_window_layers": 28}
QWEN2 = _values(DECODER, 4096, 22016, 32, 32, 151936, 32768, num_key_value_heads=32, **NO_WINDOW)
QWEN2_VL = _values(
    DECODER, 8192, 29568, 80, 64, 152064, 32768, num_key_value_heads=8, **NO_WINDOW | {"max_window_layers": 80}
)
GEMMA: Defaults = {"head_dim": 256, "attention_bias": False, "tie_word_embeddings": True}
SMOLVLM = _values(VISION, 1152, 3072, 12, 16, 32, 3)
LLAVA: Defaults = {"vision_feature_layer": -2, "vision_feature_select_strategy": "default"}
# By ``model_type``, of a whole model or of a part.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": _values(DECODER, 4096, 11008, 32, 32, 32000, 2048, attention_bias=False),
    "mistral": MISTRAL,
    "ministral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN2 | {"head_dim": 128, "attention_bias": False},
    "qwen2_vl_text": QWEN2_VL,
    "qwen2_5_vl_text": QWEN2_VL,
    "qwen3_vl_text": _values(DECODER, 4096, 22016, 32, 32, 151936, 128000, num_key_value_heads=32)
    | {"head_dim": 128, "attention_bias": False},
    "gemma": _values(DECODER, 3072, 24576, 28, 16, 256000, 8192, num_key_value_heads=16, **GEMMA),
    "gemma2": _values(DECODER, 2304, 9216, 26, 8, 256000, 8192, num_key_value_heads=4, sliding_window=4096, **GEMMA),
    "gemma3_text": _values(
        DECODER, 2304, 9216, 26, 8, 262208, 131072, num_key_value_heads=4, sliding_window=4096, **GEMMA
    ),
    "phi3": _values(DECODER, 3072, 8192, 32, 32, 32064, 4096),
    "smollm3": _values(DECODER, 2048, 11008, 36, 16, 128256, 32768, num_key_value_heads=4, attention_bias=False)
    | {"use_sliding_window": False, "tie_word_embeddings": True},
    "olmo2": _values(DECODER, 4096, 11008, 32, 32, 50304, 2048, attention_bias=False),
    "starcoder2": _values(DECODER, 3072, 12288, 30, 24, 49152, 4096, num_key_value_heads=2)
    | {"use_bias": True, "tie_word_embeddings": True},
    "phi4_multimodal": _values(DECODER, 3072, 8192, 32, 32, 200064, 131072, num_key_value_heads=8),
    "clip_vision_model": _values(VISION, 768, 3072, 12, 12, 32, 3),
    "siglip_vision_model": _values(VISION, 768, 3072, 12, 12, 16, 3),
    "pixtral": _values(VISION, 1024, 4096, 24, 16, 16, 3),
    "internvl_vision": _values(VISION, 1024, 4096, 24, 16, [14, 14], 3, attention_bias=False),
    "idefics2_vision": _values(VISION, 768, 3072, 12, 12, 32, 3),
    "idefics2_perceiver": {"hidden_size": 4096, "num_key_value_heads": 4, "resampler_n_latents": 64}
    | {"resampler_depth": 3, "resampler_n_heads": 16, "resampler_head_dim": 96},
    "idefics3_vision": SMOLVLM,
    "smolvlm_vision": SMOLVLM,
    "qwen2_vl_vision": _values(QWEN_VISION, 3584, 32, 14, 16, 3, 2, 2, embed_dim=1280, mlp_ratio=4),
    "qwen2_5_vl_vision": _values(QWEN_VISION, 3584, 32, 14, 16, 3, 2, 2, intermediate_size=3420, out_hidden_size=3584)
    | {"window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]},
    "qwen3_vl_vision": _values(QWEN_VISION, 1152, 27, 16, 16, 3, 2, 2, intermediate_size=4304, out_hidden_size=3584)
    | {"deepstack_visual_indexes": [8, 16, 24]},
    "phi4_multimodal_vision": _values(VISION, 1152, 4304, 27, 16, 14, 3),
    "phi4_multimodal_audio": {"hidden_size": 1024, "intermediate_size": 1536, "num_blocks": 24}
    | {"num_attention_heads": 16, "input_size": 80, "time_reduction": 8, "nemo_conv_channels": 1024}
    | {"downsample_rate": 1},
    "qwen2_audio_encoder": _values(WHISPER, 1280, 32, 20, 5120, 128),
    "voxtral_encoder": _values(NEWER, 1280, 5120, 32, 20, num_mel_bins=128),
    "whisper": _values(WHISPER, 384, 4, 6, 1536, 80),
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
