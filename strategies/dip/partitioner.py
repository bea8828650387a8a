"""DIP's planner and batches (arXiv:2504.14145): each module in segments of its own on all pipeline ranks.

The LLM takes whole microbatches, other modules sub-microbatches just large enough to be efficient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, ClassVar

import numpy as np

from entrain_bench.balancing.candidates import Candidate, by_estimate
from entrain_bench.balancing.interface import MakeProgram
from entrain_bench.balancing.lpt import arrival_places, place_in_group
from entrain_bench.balancing.options import TrialOptions
from entrain_bench.balancing.planning import (
    mean_length,
    partition_layers,
    recompute_choices,
    recompute_factor,
    stage_sums,
)
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.tuning import chosen_layout
from entrain_bench.base.arithmetic import decisive, matmul
from entrain_bench.base.arrays import FloatArray, IntArray, offsets_from_counts
from entrain_bench.base.errors import DeadlockError, IncompatibleError
from entrain_bench.program.assignment import Assignment, ModuleAssignment
from entrain_bench.program.layout import Layout, ModuleLayout, check_layout
from entrain_bench.specs.job import Degrees, Job
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.parse import Count, OneOf
from entrain_bench.specs.shapes import SampleShapes

from .scheduler import believed_s

# Packed tokens at which a module's efficiency counts as its peak.
PEAK_TOKENS = 131_072
# Share of a module's peak throughput that a sub-microbatch must reach.
EFFICIENCY = 0.95
# Sequence whose layer times split a module that no profiled sample exercises.
FALLBACK_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class DipAssigner:
    """Samples in arrival order; each encoder and generator cuts the items of a microbatch into sub-microbatches."""

    handles_generators: ClassVar[bool] = True

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Labels of every module's units, which samples may part; ``IncompatibleError`` if modules differ in DP."""
        job = profile.job
        dp = layout.modules[0].dp
        if any(placed.dp != dp for placed in layout.modules):
            raise IncompatibleError("strategy.assigner: DIP needs the same DP for all modules")
        replica, microbatch = arrival_places(len(shapes), job.microbatch_size, dp)
        labels = []
        for module, placed in zip(job.model.modules, layout.modules, strict=True):
            if not module.per_item:
                labels.append(ModuleAssignment(replica, microbatch))
                continue
            most = efficient_items(profile, module, shapes, placed.tp, placed.cp)
            owner = shapes.item_sample[module.units(shapes)]
            labels.append(ModuleAssignment(replica[owner], sub_microbatches(replica[owner], microbatch[owner], most)))
        return Assignment(tuple(labels))


def efficient_items(profile: Profile, module: ModuleSpec, shapes: SampleShapes, tp: int, cp: int) -> int:
    """B_i: the fewest items of mean length whose measured throughput reaches ``EFFICIENCY`` of the peak.

    The peak is the best over powers of two up to ``PEAK_TOKENS`` packed tokens.
    """
    lengths = module.lengths(shapes, module.units(shapes))
    if not len(lengths):
        return 1
    length = mean_length(lengths)
    counts = np.bincount(module.layer_kind, minlength=len(module.kinds))

    def throughput(items: int) -> float:
        times = profile.layers.measure(module, np.full(items, length), tp, cp)
        return items / float(matmul(counts, [t.total_s[0] for t in times]))

    sizes = [2**i for i in range(max(1, (PEAK_TOKENS // length).bit_length()))]
    measured = [throughput(size) for size in sizes]
    wanted = EFFICIENCY * max(measured)
    first = next(index for index, value in enumerate(measured) if value >= wanted)
    if first == 0:
        return 1
    # Between the last power of two that falls short and the first that does not.
    return next((n for n in range(sizes[first - 1] + 1, sizes[first]) if throughput(n) >= wanted), sizes[first])


def sub_microbatches(replica: IntArray, microbatch: IntArray, most: int) -> IntArray:
    """Place of each item's sub-microbatch in its replica's order, from replica and LLM microbatch of each ``[items]``.

    N items of a microbatch form ceil(N / most) sub-microbatches of nearly equal size, in order.
    """
    if not len(replica):
        return np.zeros(0, np.int64)
    key = replica.astype(np.int64) * (1 + int(microbatch.max())) + microbatch
    _, first_item, group, size = np.unique(key, return_index=True, return_inverse=True, return_counts=True)
    count = -(-size // most)
    before = offsets_from_counts(count)[:-1]
    # Groups are sorted by replica: count from the first group of each.
    owner = replica[first_item]
    before = before - before[np.searchsorted(owner, owner)]
    return np.asarray(before[group] + place_in_group(group) * count[group] // size[group])


@dataclass(frozen=True, slots=True)
class DipPlanner(TrialOptions):
    """Colocates K_i stages of every module i on every rank; a module's stages are balanced by themselves.

    Attributes:
        profile_samples: samples the layers are measured on; 4 is the one microbatch that arXiv:2605.27918 plans DIP by.
        chunks: K_i: ``rule`` as in the paper, ``one``, or ``auto`` for the faster by believed time.
    """

    handles_generators: ClassVar[bool] = True
    profile_samples: Count = 4
    chunks: Annotated[str, OneOf(("auto", "one", "rule"))] = "auto"
    num_trials: Count = 1

    def plan(self, profile: Profile, make_program: MakeProgram) -> Layout:
        """The layout with the least believed time of a profiled batch among those whose programs fit memory."""
        samples = profile.samples.draw(self.profile_samples)
        batch = profile.samples.draw(profile.job.global_batch)
        return chosen_layout(
            profile,
            lambda sized: by_estimate(self._candidates(sized, samples, batch, make_program)),
            make_program,
            self.num_trials,
            quick=lambda sized: by_estimate(self._balanced(sized, samples, make_program)),
        )

    def _layouts(
        self, profile: Profile, samples: SampleShapes, make_program: MakeProgram
    ) -> Iterator[tuple[Layout, list[FloatArray], tuple[int, ...]]]:
        """Every degree, K_i and choice of recomputation: the layout, seconds of every layer on ``samples``, and K_i.

        ``samples`` decide the split. Recomputation is part of the layout, unless the scheduler chooses it.
        """
        modules = profile.job.model.modules
        choices = recompute_choices(profile.job, chosen_later=make_program.chooses_recomputation)
        for degrees, recompute in product(profile.job.degrees(), choices):
            cost = []
            for module in modules:
                lengths = module.lengths(samples, module.units(samples))
                probe = lengths if len(lengths) else np.array([FALLBACK_TOKENS])
                cost.append(profile.layers.layer_s(module, probe, degrees.tp, degrees.cp))
            for chunks in self._chunk_choices(profile, samples, degrees):
                stages = [min(k * degrees.pp, len(module.layers)) for k, module in zip(chunks, modules, strict=True)]
                layers = [partition_layers(layer_s, count) for layer_s, count in zip(cost, stages, strict=True)]
                yield colocate(profile.job, degrees, layers, recompute), cost, chunks

    def _balanced(self, profile: Profile, samples: SampleShapes, make_program: MakeProgram) -> Iterator[Candidate]:
        """The layouts, timed for the tuner as pipelines of mean microbatches whose busiest rank is always busy."""
        for layout, cost, _ in self._layouts(profile, samples, make_program):
            ranks = np.zeros(profile.job.cluster.num_ranks)
            for placed, layer_s in zip(layout.modules, cost, strict=True):
                again = recompute_factor(placed.recompute)
                np.add.at(ranks, placed.ranks[0, :, 0], again * stage_sums(layer_s, placed.layers_per_stage))
            ranks *= profile.job.microbatch_size / len(samples)
            fill_s = ranks.sum() / layout.modules[profile.job.model.llm_index].stages_per_rank
            seconds = fill_s + (layout.num_microbatches - 1) * ranks.max()
            yield Candidate(float(seconds) + profile.programs.step_s(layout), layout)

    def _candidates(
        self, profile: Profile, samples: SampleShapes, batch: SampleShapes, make_program: MakeProgram
    ) -> Iterator[Candidate]:
        """The layouts, timed by belief on one batch: recomputation is picked by what it makes of the schedule."""
        # The order that the search begins with tells layouts apart as well as the one it ends with (docs).
        order = make_program.draft
        for layout, _, chunks in self._layouts(profile, samples, make_program):
            try:
                seconds = believed_s(profile, order(batch, layout))
            except DeadlockError as error:
                raise IncompatibleError(
                    "strategy.scheduler: cannot order modules on the same ranks, where strategy/planner=dip places them"
                ) from error
            except IncompatibleError:
                # Other orders may take one stage a rank only.
                if self.chunks == "auto" and max(chunks) > 1:
                    continue
                raise
            yield Candidate(seconds + profile.programs.step_s(layout), layout)

    def _chunk_choices(self, profile: Profile, samples: SampleShapes, degrees: Degrees) -> list[tuple[int, ...]]:
        """K_i of every module, for each layout to consider."""
        one = (1,) * len(profile.job.model.modules)
        if self.chunks == "one":
            return [one]
        rule = chunks_per_rank(profile, samples, degrees)
        return [rule] if self.chunks == "rule" or rule == one else [one, rule]


def chunks_per_rank(profile: Profile, samples: SampleShapes, degrees: Degrees) -> tuple[int, ...]:
    """K_i = floor(T_i / T_1): chunks of each module on a rank, so that segments take about equally long.

    T_i is the measured time of both passes of the module on B_i items of mean length, for the LLM on a microbatch of
    mean samples; T_1 is the least. K_i leaves every stage a layer, and is at least 1. Modules without items count one
    chunk.
    """
    modules = profile.job.model.modules
    seconds = np.full(len(modules), np.inf)
    for index, module in enumerate(modules):
        lengths = module.lengths(samples, module.units(samples))
        if not len(lengths):
            continue
        count = profile.job.microbatch_size
        if module.per_item:
            count = efficient_items(profile, module, samples, degrees.tp, degrees.cp)
        units = np.full(count, mean_length(lengths))
        seconds[index] = profile.layers.layer_s(module, units, degrees.tp, degrees.cp).sum()
    ratio = decisive(np.where(np.isfinite(seconds), seconds, seconds.min()) / seconds.min())
    most = [max(1, len(module.layers) // degrees.pp) for module in modules]
    return tuple(min(int(k), limit) for k, limit in zip(ratio, most, strict=True))


def colocate(job: Job, degrees: Degrees, layers: Sequence[tuple[int, ...]], recompute: Sequence[bool]) -> Layout:
    """All modules of a replica on the same consecutive blocks of TP x CP ranks; stages go round the blocks.

    With fewer stages than blocks, encoders leave out the last blocks, the LLM and generators the first ones. ``layers``
    are those of each stage, for every module.
    """
    width = degrees.tp * degrees.cp
    ranks = np.arange(degrees.dp * degrees.pp * width).reshape(degrees.dp, degrees.pp, width)
    modules = []
    for module, split, again in zip(job.model.modules, layers, recompute, strict=True):
        first = 0 if module.is_encoder else max(0, degrees.pp - len(split))
        held = ranks[:, (first + np.arange(len(split))) % degrees.pp]
        modules.append(ModuleLayout(module.name, degrees.tp, degrees.cp, split, held, again))
    layout = Layout(tuple(modules), job.num_microbatches(degrees.dp))
    check_layout(layout, job.model, job.cluster)
    return layout
