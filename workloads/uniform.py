"""Samples without imbalance: one packed sequence each, the same share of it vision tokens."""

from __future__ import annotations

from dataclasses import dataclass

from entrain_bench.base.errors import require
from entrain_bench.specs.tokens import MAX_TOKENS, TokenRules

from .sample_blocks import Generated
from .synthetic import SyntheticSource, SyntheticWorkload


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformMix(Generated):
    """Packed sequences of one length with images of one size (arXiv:2605.27678, section 5).

    Sizes are in LLM tokens. ``vision_share``, below 1, is that of vision tokens, which must make whole images.
    Encoder tokens follow the model's rules if their ratio is None.
    """

    name: str
    sequence_tokens: int
    vision_share: float
    image_tokens: int
    encoder_tokens_per_llm_token: float | None = None

    def __post_init__(self) -> None:
        fits = 1 <= self.sequence_tokens <= MAX_TOKENS
        require(fits, "workload.sequence_tokens", self.sequence_tokens, f"at least 1, at most {MAX_TOKENS}")
        require(self.image_tokens >= 1, "workload.image_tokens", self.image_tokens, "at least 1")
        rate = self.encoder_tokens_per_llm_token
        most = MAX_TOKENS / self.image_tokens
        given = rate is None or 0 < rate <= most
        require(given, "workload.encoder_tokens_per_llm_token", rate, f"null or above 0, at most {most:g}")
        require(0 <= self.vision_share < 1, "workload.vision_share", self.vision_share, "in [0, 1)")
        images = self._images()
        unit = f"a multiple of image_tokens / sequence_tokens = {self.image_tokens / self.sequence_tokens}"
        require(abs(images - round(images)) < 1e-6, "workload.vision_share", self.vision_share, unit)

    def source(self, rules: TokenRules) -> SyntheticSource:
        """The generator of samples."""
        num_images = round(self._images())
        images = {
            "llm_tokens": self.image_tokens,
            "items_per_sample": num_images,
            "encoder_tokens_per_llm_token": self.encoder_tokens_per_llm_token,
        }
        text = self.sequence_tokens - num_images * self.image_tokens
        return SyntheticWorkload(name=self.name, text=text, modalities={"image": images}).source(rules)

    def _images(self) -> float:
        return self.vision_share * self.sequence_tokens / self.image_tokens
