"""Options of training stacks: samples dealt out by patches, grouped by length, or packed up to a token budget.

- NVIDIA-NeMo/Megatron-Bridge, pull request 4608: DistTrain's first reordering, a microbatch step at a time.
- ``group_by_length`` of transformers (``get_length_grouped_indices``), so that samples of a microbatch are similar, and
LLaVA's ``group_by_modality_length``, so that microbatches are similar; both inside one global batch.
- fairseq's ``--max-tokens`` (fairseq/data/data_utils.py, ``batch_by_size``), first fit by falling length as in Energon
  and the multipack sampler, and verl's Karmarkar-Karp (verl/utils/seqlen_balancing.py, ``rearrange_micro_batches``).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Annotated, ClassVar

import numpy as np

from entrain_bench.balancing.lpt import balanced_groups, balanced_in_steps, largest_differencing, next_fit
from entrain_bench.balancing.profile import Profile
from entrain_bench.base.arithmetic import GOLDEN, mix
from entrain_bench.base.arrays import BoolArray, FloatArray, IntArray
from entrain_bench.base.compiled import njit
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.base.hosttime import each_replica_alone
from entrain_bench.program.assignment import Assignment, ModuleAssignment, same_microbatches
from entrain_bench.program.layout import Layout
from entrain_bench.specs.parse import Count, OneOf
from entrain_bench.specs.shapes import SampleShapes


@dataclass(frozen=True, slots=True)
class PatchBalance:
    """Equal-count LPT by vision patches over the least common multiple of the modules' DP, inside each microbatch step.

    Attributes:
        carry: whether a group's load in the steps before counts; the original balances each step separately.
    """

    handles_generators: ClassVar[bool] = True
    carry: bool = False

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Replica of every sample by module; ``IncompatibleError`` if a microbatch step does not fill groups evenly."""
        job = profile.job
        llm = layout.modules[job.model.llm_index]
        step = job.microbatch_size * llm.dp
        num_groups = lcm(*(placed.dp for placed in layout.modules))
        if step % num_groups:
            raise IncompatibleError(
                f"strategy.assigner=bridge_reorder: the {step} samples of a microbatch step (microbatch_size="
                f"{job.microbatch_size} x dp={llm.dp}) do not divide among {num_groups} groups, the least common "
                "multiple of the modules' dp"
            )
        patches = np.zeros(len(shapes))
        for module in job.model.encoders:
            units = module.units(shapes)
            patches += shapes.sum_items(units, module.lengths(shapes, units).astype(np.float64))
        group = balanced_in_steps(patches, num_groups, step, self.carry, fewest_first=False)
        microbatch = np.arange(len(shapes)) // step
        modules = []
        for module, placed in zip(job.model.modules, layout.modules, strict=True):
            samples = module.owners(shapes, module.units(shapes))
            # Adjacent groups form a replica, so that replicas of two modules hold the same samples.
            replica = group[samples] // (num_groups // placed.dp)
            modules.append(ModuleAssignment(replica, microbatch[samples]))
        return Assignment(tuple(modules))


@dataclass(frozen=True, slots=True)
class LengthGrouped:
    """Samples in the order of a length-grouped sampler; microbatches go round the replicas as with any sampler.

    Attributes:
        rule: ``length``: as transformers' ``group_by_length``, by LLM tokens; ``modality_length``: LLaVA's, by text.
        mega_batches: iterations' samples of a replica that ``length`` sorts together, but at most one global batch;
            transformers: the lesser of 50 and a quarter of the data set.
    """

    handles_generators: ClassVar[bool] = True
    rule: Annotated[str, OneOf(("length", "modality_length"))] = "length"
    mega_batches: Count = 50

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Replica and microbatch from the place in the sampler's order."""
        job = profile.job
        dp = layout.modules[profile.job.model.llm_index].dp
        drawn = mix(shapes.sample_ids.astype(np.uint64) * GOLDEN ^ mix(np.array([GOLDEN])))
        order: IntArray = np.argsort(drawn, kind="stable")
        if self.rule == "length":
            length = shapes.llm_tokens.astype(np.float64)
            order = sorted_in_mega_batches(order, length, self.mega_batches * (len(shapes) // dp))
        else:
            length = shapes.text_tokens.astype(np.float64)
            order = even_by_modality(order, length, np.diff(shapes.item_offsets) > 0, job.microbatch_size)
        place = np.empty(len(shapes), np.int64)
        place[order] = np.arange(len(shapes)) // job.microbatch_size
        return same_microbatches(job.model, shapes, place % dp, place // dp, place // dp)


def sorted_in_mega_batches(order: IntArray, length: FloatArray, mega_batch: int) -> IntArray:
    """The order, cut into mega-batches that are each sorted by falling length; the longest sample comes first."""
    result = order.copy()
    starts = range(0, len(order), mega_batch)
    for start in starts:
        part = order[start : start + mega_batch]
        result[start : start + mega_batch] = part[np.argsort(-length[part], kind="stable")]
    # Memory that does not suffice shows at once.
    longest = max(starts, key=lambda start: length[result[start]])
    result[[0, longest]] = result[[longest, 0]]
    return result


def even_by_modality(order: IntArray, length: FloatArray, has_items: BoolArray, size: int) -> IntArray:
    """The order, cut into microbatches of ``size`` samples of one modality each with about equal sums of lengths.

    Samples with items and those without are dealt out apart, by falling length, each to the microbatch with the least
    so far that has a free place. Samples that fill no microbatch come last, in order of arrival.
    """
    full = []
    rest = []
    for wanted in (True, False):
        mine = order[has_items[order] == wanted]
        num_microbatches = len(mine) // size
        kept = mine[: num_microbatches * size]
        rest.append(mine[len(kept) :])
        if len(kept):
            chunk = balanced_groups(length[kept], num_microbatches, fewest_first=False)
            full.append(kept[np.argsort(chunk, kind="stable")])
    return np.concatenate([*full, np.sort(np.concatenate(rest), kind="stable")])


NEXT, FIRST, FALLING, DIFFERENCING = PACKING_RULES = ("next_fit", "first_fit", "first_fit_decreasing", "karmarkar_karp")


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Fills microbatches up to a number of tokens.

    Attributes:
        rule: ``next_fit`` closes a microbatch when the next sample in order of arrival does not fit.
            ``first_fit`` puts samples in order of arrival into the first microbatch with room, and
            ``first_fit_decreasing`` by falling length, as LLaMA-Factory's greedy knapsack does.
            ``karmarkar_karp`` balances replicas of equally many samples, then as many microbatches as the heaviest
            needs.
        max_tokens: most tokens of a microbatch; a longer sample forms its own microbatch. ``karmarkar_karp`` uses it
            only for the number of microbatches, as verl does. None: the average of ``microbatch_size`` samples.
        buffer: samples in order of arrival that are packed together, except by ``karmarkar_karp``; None: all.
        counted: tokens of the LLM's sequences, or of those and of the encoders' (``all``).
    """

    handles_generators: ClassVar[bool] = True
    packs: ClassVar[bool] = True
    rule: Annotated[str, OneOf(PACKING_RULES)] = FALLING
    max_tokens: Count | None = None
    counted: Annotated[str, OneOf(("llm", "all"))] = "llm"
    buffer: Count | None = None

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
        if self.rule == DIFFERENCING:
            replica, microbatch = balanced(tokens, dp, budget)
        else:
            pack = self._packs(tokens, budget)
            replica = pack % dp
            microbatch = pack // dp
        return same_microbatches(job.model, shapes, replica, microbatch, microbatch)

    def _packs(self, tokens: IntArray, budget: int) -> IntArray:
        """Pack of each sample, buffer by buffer ``[samples]``."""
        pack = np.empty(len(tokens), np.int64)
        size = self.buffer or len(tokens)
        opened = 0
        for start in range(0, len(tokens), size):
            part = tokens[start : start + size]
            order = np.argsort(-part, kind="stable") if self.rule == FALLING else np.arange(len(part))
            chosen = (next_fit if self.rule == NEXT else first_fit)(part, order, budget)
            pack[start : start + size] = opened + chosen
            opened += 1 + int(chosen.max())
        return pack


def balanced(tokens: IntArray, num_replicas: int, budget: int) -> tuple[IntArray, IntArray]:
    """Replica and microbatch of each sample, as verl's trainer and ``rearrange_micro_batches`` choose them.

    Replicas get equally many samples, and as many microbatches as the heaviest one needs, if they have the samples.
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
    """Bin of each sample: in the given order, the first with room; above the budget an unopened one ``[samples]``."""
    room = np.full(len(order), budget)
    chosen = np.empty(len(order), np.int64)
    for sample in order:
        need = min(tokens[sample], budget)
        one = 0
        while room[one] < need:
            one += 1
        chosen[sample] = one
        room[one] -= need
    return chosen
