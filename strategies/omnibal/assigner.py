"""OmniBal's balanced dynamic mini-batches (arXiv:2407.20761)."""

from __future__ import annotations

from dataclasses import dataclass

from entrain_bench.balancing.profile import Profile
from entrain_bench.base.errors import require
from entrain_bench.program.assignment import Assignment, same_microbatches
from entrain_bench.program.layout import Layout
from entrain_bench.specs.shapes import SampleShapes

from .grouping import Caps, caps_for, filtered_groups


@dataclass(frozen=True, slots=True)
class OmniBalAssigner:
    """Groups samples under caps on encoder and LLM tokens; groups go round the replicas.

    Attributes:
        max_vision_tokens: Q_v in encoder tokens; None: found with Q_t.
        max_text_tokens: Q_t in LLM tokens; None: the least caps whose groups have ``microbatch_size`` samples on
            average.
        threshold: share of a cap at which a group is full; the public code has 3968 of 4096 tokens.
        rounds: T of the iterative sampling and filtering; 1: groups are filled in one random order.
        seed: of its shuffles.
    """

    max_vision_tokens: int | None = None
    max_text_tokens: int | None = None
    threshold: float = 0.97
    rounds: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        where = "strategy.assigner"
        for name in ("max_vision_tokens", "max_text_tokens"):
            most = getattr(self, name)
            require(most is None or most >= 1, f"{where}.{name}", most, "null or at least 1")
        both = (self.max_vision_tokens is None) == (self.max_text_tokens is None)
        require(
            both, f"{where}.max_vision_tokens", self.max_vision_tokens, "given with max_text_tokens, or null as it is"
        )
        require(0 < self.threshold <= 1, f"{where}.threshold", self.threshold, "above 0, at most 1")
        require(self.rounds >= 1, f"{where}.rounds", self.rounds, "at least 1")
        require(self.seed >= 0, f"{where}.seed", self.seed, "at least 0")

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Group g is microbatch g // DP of replica g mod DP."""
        job, dp = profile.job, layout.modules[-1].dp
        modalities = [name for module in job.model.encoders for name in module.config.modalities]
        vision, text = shapes.encoder_tokens(modalities), shapes.llm_tokens
        filtering = self.threshold, self.rounds, self.seed
        if self.max_vision_tokens is not None and self.max_text_tokens is not None:
            caps = Caps(self.max_vision_tokens, self.max_text_tokens)
        else:
            caps = caps_for(vision, text, job.microbatch_size, *filtering)
        group = filtered_groups(vision, text, caps, *filtering)
        return same_microbatches(job.model, shapes, group % dp, group // dp, group // dp)
