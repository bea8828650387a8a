"""OmniBal's balanced dynamic mini-batches (arXiv:2407.20761): groups that fill one of two caps.

Groups are found by iterative sampling and filtering (Algorithm 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from entrain_bench.balancing.options import check_least
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.arrays import IntArray
from entrain_bench.base.compiled import njit
from entrain_bench.base.errors import require
from entrain_bench.program.assignment import Assignment, same_microbatches
from entrain_bench.program.layout import Layout
from entrain_bench.specs.shapes import SampleShapes

# Growth of the caps per attempt, and their maximum, relative to the average tokens of a microbatch.
CAP_STEP = 0.05
MAX_CAP = 8.0


@dataclass(frozen=True, slots=True)
class Caps:
    """Maximum tokens of a group: in the encoders (the paper's Q_v counts images) and in the LLM (Q_t)."""

    vision: int
    text: int


def filtered_groups(vision: IntArray, text: IntArray, caps: Caps, threshold: float, rounds: int, seed: int) -> IntArray:
    """Return the group of each sample, numbered from 0 ``[samples]``, from its encoder and LLM tokens ``[samples]``.

    Each round shuffles the remaining samples and fills groups in that order, each until it reaches a cap. A group that
    fills a cap to ``threshold`` is kept; samples of other groups enter the next round. After the last round all groups
    are kept. A sample above a cap forms its own group; the public code drops it.
    """
    group = np.full(len(text), -1)
    beyond = (vision > caps.vision) | (text > caps.text)
    count = int(beyond.sum())
    group[beyond] = np.arange(count)
    left = np.flatnonzero(~beyond)
    for number in range(rounds):
        order = left[np.random.default_rng([seed, number]).permutation(len(left))]
        groups = fill(vision[order], text[order], caps.vision, caps.text)
        sums = [np.bincount(groups, weights=tokens[order]) for tokens in (vision, text)]
        full = (sums[0] >= threshold * caps.vision) | (sums[1] >= threshold * caps.text)
        if number == rounds - 1:
            full[:] = True
        renumbered = count + np.cumsum(full) - 1
        stays = full[groups]
        group[order[stays]] = renumbered[groups[stays]]
        count += int(full.sum())
        left = order[~stays]
        if not len(left):
            break
    return group


@njit()
def fill(vision, text, most_vision, most_text):  # type: ignore[no-untyped-def]
    """Return the group of each sample: the open group, or a new one if the sample would exceed a cap ``[samples]``."""
    group = np.empty(len(text), np.int64)
    number = 0
    own_vision = 0
    own_text = 0
    empty = True
    for sample in range(len(text)):
        exceeds = own_vision + vision[sample] > most_vision or own_text + text[sample] > most_text
        if exceeds and not empty:
            number = number + 1
            own_vision = 0
            own_text = 0
        group[sample] = number
        empty = False
        own_vision += vision[sample]
        own_text += text[sample]
    return group


def caps_for(vision: IntArray, text: IntArray, microbatch_size: int, threshold: float, rounds: int, seed: int) -> Caps:
    """Return the least caps whose groups have ``microbatch_size`` samples on average.

    As in the public code, both caps start at the mean lengths and grow in steps, in the proportion of the batch's
    tokens.
    """
    caps = Caps(1, 1)
    share = 1.0
    most_groups = -(-len(text) // microbatch_size)
    while share <= MAX_CAP:
        caps = Caps(
            *(
                max(1, int(np.ceil(share * microbatch_size * int(tokens.sum()) / len(text))))
                for tokens in (vision, text)
            )
        )
        if 1 + filtered_groups(vision, text, caps, threshold, rounds, seed).max() <= most_groups:
            break
        share += CAP_STEP
    return caps


@dataclass(frozen=True, slots=True)
class OmniBalAssigner:
    """Assigner that groups samples under caps on encoder and LLM tokens, and deals groups to replicas in turn.

    Attributes:
        max_vision_tokens: Q_v in encoder tokens; None: chosen together with Q_t.
        max_text_tokens: Q_t in LLM tokens; None: the least caps whose groups have ``microbatch_size`` samples on
            average.
        threshold: share of a cap at which a group is full; the public code has 3968 of 4096 tokens.
        rounds: T of the iterative sampling and filtering; 1: one random order fills all groups.
        seed: seed of the shuffles.
    """

    max_vision_tokens: int | None = None
    max_text_tokens: int | None = None
    threshold: float = 0.97
    rounds: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        where = "strategy.assigner"
        check_least(self, where, 1, "max_vision_tokens", "max_text_tokens", "rounds")
        check_least(self, where, 0, "seed")
        both = (self.max_vision_tokens is None) == (self.max_text_tokens is None)
        require(
            both,
            f"{where}.max_vision_tokens",
            self.max_vision_tokens,
            f"null exactly if max_text_tokens is null; max_text_tokens={self.max_text_tokens}",
        )
        require(0 < self.threshold <= 1, f"{where}.threshold", self.threshold, "above 0, at most 1")

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Make group g the microbatch g // DP of replica g mod DP."""
        job = profile.job
        dp = layout.modules[-1].dp
        modalities = [name for module in job.model.encoders for name in module.config.modalities]
        vision = shapes.encoder_tokens(modalities)
        text = shapes.llm_tokens
        filtering = self.threshold, self.rounds, self.seed
        if self.max_vision_tokens is not None and self.max_text_tokens is not None:
            caps = Caps(self.max_vision_tokens, self.max_text_tokens)
        else:
            caps = caps_for(vision, text, job.microbatch_size, *filtering)
        group = filtered_groups(vision, text, caps, *filtering)
        return same_microbatches(job.model, shapes, group % dp, group // dp, group // dp)
