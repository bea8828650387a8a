"""Microbatches of so many tokens instead of so many samples: three rules of data loaders that pack sequences.

``--max-tokens`` of fairseq (fairseq/data/data_utils.py, ``batch_by_size``), first fit by falling length as in
Megatron-LM's multimodal loader on Energon and the multipack sampler, and verl's dynamic batch size
(verl/utils/seqlen_balancing.py, ``rearrange_micro_batches``: Karmarkar-Karp).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from entrain_bench.balancing.lpt import largest_differencing, next_fit
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.arrays import IntArray
from entrain_bench.base.compiled import njit
from entrain_bench.base.hosttime import each_replica_alone
from entrain_bench.program.assignment import Assignment, same_microbatches
from entrain_bench.program.layout import Layout
from entrain_bench.specs.parse import Count, OneOf
from entrain_bench.specs.shapes import SampleShapes


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Fills microbatches up to a number of tokens.

    Attributes:
        rule: ``next_fit`` closes a microbatch when the next sample in order of arrival does not fit;
            ``first_fit_decreasing`` takes samples by falling length, each into the first microbatch with room;
            ``karmarkar_karp`` balances replicas with equally many samples, then as many microbatches on every replica
            as the heaviest one needs at least.
        max_tokens: tokens of a microbatch at most; a longer sample is one by itself, and ``karmarkar_karp`` takes it
            for the number of microbatches only, as verl does. None: what ``microbatch_size`` samples of the batch have
            on average.
        counted: tokens of the LLM's sequences, or of those and of the encoders' (``all``).
    """

    handles_generators: ClassVar[bool] = True
    rule: Annotated[str, OneOf(("next_fit", "first_fit_decreasing", "karmarkar_karp"))] = "first_fit_decreasing"
    max_tokens: Count | None = None
    counted: Annotated[str, OneOf(("llm", "all"))] = "llm"

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Replica and microbatch by tokens alone; microbatches go round the replicas in the order they were opened."""
        job = profile.job
        dp = layout.modules[profile.job.model.llm_index].dp
        tokens = shapes.llm_tokens
        if self.counted == "all":
            modalities = [name for module in job.model.encoders for name in module.config.modalities]
            tokens = tokens + shapes.encoder_tokens(modalities)
        mean = -(-int(tokens.sum()) * job.microbatch_size // len(tokens))
        budget = self.max_tokens or max(1, mean)
        if self.rule == "karmarkar_karp":
            replica, microbatch = balanced(tokens, dp, budget)
        else:
            order = np.arange(len(tokens)) if self.rule == "next_fit" else np.argsort(-tokens, kind="stable")
            microbatch = (next_fit if self.rule == "next_fit" else first_fit)(tokens, order, budget)
            replica = microbatch % dp
            microbatch = microbatch // dp
        return same_microbatches(job.model, shapes, replica, microbatch, microbatch)


def balanced(tokens: IntArray, num_replicas: int, budget: int) -> tuple[IntArray, IntArray]:
    """Replica and microbatch of each sample, as verl's trainer and ``rearrange_micro_batches`` choose them.

    Replicas get equally many samples. All have as many microbatches: ceil(tokens / budget) of the heaviest replica, as
    far as each has samples for them, so that a microbatch may exceed the budget.
    """
    replica = largest_differencing(tokens, num_replicas, equal_count=True)
    load = np.bincount(replica, weights=tokens, minlength=num_replicas).astype(np.int64)
    most = max(1, int(np.bincount(replica, minlength=num_replicas).min()))
    count = min(int(-(-load.max() // budget)), most)
    microbatch = np.empty(len(tokens), np.int64)
    with each_replica_alone(num_replicas):
        for one in range(num_replicas):
            mine = np.flatnonzero(replica == one)
            part = largest_differencing(tokens[mine], count)
            # verl does not sort its parts; here they run in the order of their first samples.
            firsts = np.full(count, len(tokens))
            np.minimum.at(firsts, part, mine)
            microbatch[mine] = np.argsort(np.argsort(firsts, kind="stable"), kind="stable")[part]
    return replica, microbatch


@njit()
def first_fit(tokens, order, budget):  # type: ignore[no-untyped-def]
    """Bin of each sample: in the given order, the first one with room for it ``[samples]``.

    A binary tree over the bins knows the most room below each node. What exceeds the budget takes a bin that is not
    open.
    """
    width = 1
    while width < len(order):
        width *= 2
    room = np.full(2 * width, budget)
    chosen = np.empty(len(order), np.int64)
    for sample in order:
        need = min(tokens[sample], budget)
        node = 1
        while node < width:
            node *= 2
            if room[node] < need:
                node += 1
        chosen[sample] = node - width
        room[node] -= need
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return chosen
