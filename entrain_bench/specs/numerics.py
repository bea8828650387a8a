"""Settings that change a module's numbers but not its cost: angles, norms, activations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from entrain_bench.base.errors import UserError, require, unknown_choice
from entrain_bench.specs.parse import Count, Rate, check_mapping, parse

if TYPE_CHECKING:
    from entrain_bench.specs.module_layers import ModuleConfig

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "squared_relu")
# How a checkpoint names a module's tensors (``entrain_bench/train/weights/naming.py``).
CHECKPOINTS = ("llama", "qwen25vl_vision", "siglip", "whisper_encoder")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Rotary frequencies stretched for long contexts, as Llama 3.1 and 3.2 do it (Hugging Face's ``llama3``).

    Wavelengths longer than ``original_context_tokens / low_freq_factor`` are stretched by ``factor``, those shorter
    than ``original_context_tokens / high_freq_factor`` stay, and in between the two are mixed.
    """

    factor: Rate
    low_freq_factor: Rate
    high_freq_factor: float
    original_context_tokens: Count

    @classmethod
    def of(cls, values: Mapping[str, Any] | None, where: str = "rope_scaling") -> RopeScaling | None:
        """The scaling that a module's YAML states, None for none; ``UserError`` names a wrong key."""
        if values is None:
            return None
        scaling = parse(cls, check_mapping(values, where), where)
        low = scaling.low_freq_factor
        high = scaling.high_freq_factor
        require(high > low, f"{where}.high_freq_factor", high, f"above low_freq_factor={low}")
        return scaling


def find_activation(config: ModuleConfig) -> str:
    """The activation of a module's blocks: SiLU in gated ones, otherwise GELU, if the YAML states none."""
    return config.activation or ("silu" if config.gated_mlp else "gelu")


def check_numerics(config: ModuleConfig, where: str) -> None:
    """Raise ``UserError`` for values that no architecture has."""
    if find_activation(config) not in ACTIVATIONS:
        raise unknown_choice(f"{where}.activation", config.activation, ACTIVATIONS)
    if config.checkpoint and config.checkpoint not in CHECKPOINTS:
        raise unknown_choice(f"{where}.checkpoint", config.checkpoint, CHECKPOINTS)
    RopeScaling.of(config.rope_scaling, f"{where}.rope_scaling")
    sections = [*config.mrope_sections]
    if sections and (len(sections) != 3 or min(sections) < 0 or 2 * sum(sections) != config.head_dim):
        raise UserError(
            f"{where}.mrope_sections={sections}: must be three counts of frequencies that sum to head_dim / 2="
            f"{config.head_dim // 2}"
        )
