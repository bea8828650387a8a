"""Heterogeneous parallelism (arXiv:2605.27678): every module has degrees of its own, and data is left as it comes.

Exhaustive search over the degrees of the LLM with every grid of the encoders (the paper tunes by hand), rated by closed
forms for uniform microbatches; three-phase and graph-aware 1F1B schedules (section 2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from math import ceil
from typing import ClassVar, NamedTuple

import numpy as np

from entrain_bench.balancing.candidates import Candidate, Draft, rising_candidates
from entrain_bench.balancing.interface import MakeProgram
from entrain_bench.balancing.lpt import arrival_places, place_in_group
from entrain_bench.balancing.options import TrialOptions
from entrain_bench.balancing.planning import (
    checked_layout,
    mean_length,
    named_degrees,
    partition_layers,
    place_ranks,
    recompute_choices,
    recompute_factor,
    stage_sums,
    tensor_degrees,
)
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.recomputation import Recomputation
from entrain_bench.balancing.schedules import (
    OneForwardOneBackward,
    chain_program,
    check_colocated,
    check_routes,
    three_phase_program,
)
from entrain_bench.balancing.tuning import chosen_layout
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.base.errors import IncompatibleError, UserError, require
from entrain_bench.program import Program
from entrain_bench.program.assignment import Assignment, ModuleAssignment
from entrain_bench.program.layout import (
    Layout,
    ModuleLayout,
    find_ratio,
    is_colocated,
    is_disjoint,
    is_integer_ratio,
)
from entrain_bench.specs.job import Degrees, Job, divisors
from entrain_bench.specs.layer import BF16_BYTES
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.parse import Count
from entrain_bench.specs.shapes import SampleShapes

# Ranks of all layouts of a search together.
MAX_PLACED_RANKS = 2**28


type Layers = tuple[tuple[int, ...], ...]  # of each stage, for every module of the model


class Pair(NamedTuple):
    """Degrees of the encoders, which share one grid, and of the LLM."""

    encoder: Degrees
    llm: Degrees
    turns: int = 1  # LLM stages of a rank
    at_once: bool = False  # whether encoders that recompute keep no activations of layers
    widest: int = 1  # ranks of a node that may share an item, at most
    again: bool = False  # whether all encoders recompute in any case


def island_sizes(job: Job) -> list[int]:
    """Ranks an encoder island may have: a part of a node or whole nodes, at most half of the cluster."""
    node = job.cluster.gpus_per_node
    half = job.cluster.num_ranks // 2
    return [size for size in range(1, half + 1) if size % node == 0 or node % size == 0]


def list_pairs(
    job: Job, *, colocated: bool, encoder_ranks: int | None = None, encoder_tp: int | None = None
) -> list[Pair]:
    """Pairs that both use all ranks, or use them together; encoder CP = 1 and an integer DP ratio.

    Colocated encoders have one stage (arXiv:2605.27678, section 5). The job's request binds the LLM, its PP counts the
    stages of one chain. ``UserError`` if there is no pair, or too many.
    """
    if not job.model.encoders:
        raise IncompatibleError(
            f"model={job.model.name}: has no encoder, so encoder and LLM cannot have different degrees"
        )
    job.check_request()
    asked = job.request
    ranks = job.cluster.num_ranks
    layers = 1 if colocated else min(len(module.layers) for module in job.model.encoders)
    sizes = [encoder_ranks] if encoder_ranks else [ranks] if colocated else island_sizes(job)
    tps = tensor_degrees(job, job.model.encoders)
    if encoder_tp is not None:
        require(encoder_tp in tps, "strategy.planner.encoder_tp", encoder_tp, f"null or one of {tps}")
        tps = [encoder_tp]
    pairs = []
    for size in sizes:
        for llm in _llm_degrees(job, ranks if colocated else ranks - size):
            for tp, pp in product(tps, range(1, layers + 1)):
                dp, rest = divmod(size, tp * pp)
                stages = llm.pp if colocated else pp + llm.pp
                if not rest and is_integer_ratio(dp, llm.dp) and asked.pp in (None, stages):
                    pairs.append(Pair(Degrees(tp, 1, pp, dp), llm))
    if not pairs:
        raise UserError(
            f"{named_degrees(asked)}: no degrees of encoder and LLM with an integer ratio of DP use the {ranks} ranks "
            f"of cluster={job.cluster.name} with dp x microbatch_size={job.microbatch_size} dividing "
            f"global_batch={job.global_batch}"
        )
    if len(pairs) * ranks > MAX_PLACED_RANKS:
        raise UserError(
            f"layout: {len(pairs)} degrees of encoder and LLM on the {ranks} ranks of cluster={job.cluster.name} are "
            "too many to search. Set layout.tp, layout.cp or layout.dp"
        )
    return pairs


def place_pair(
    job: Job, pair: Pair, layers: Sequence[tuple[int, ...]], recompute: Sequence[bool], *, colocated: bool
) -> Layout:
    """Both modules on consecutive ranks; apart, the one with the wider TP comes first, so that blocks are aligned.

    Replica follows replica, TP innermost, then CP, then stages. ``layers`` are those of each stage, for every module.
    """
    encoder, llm = (
        np.arange(one.dp * one.pp * one.tp * one.cp).reshape(one.dp, one.pp, one.tp * one.cp) for one in pair[:2]
    )
    if not colocated and pair.encoder.tp > pair.llm.tp:
        llm = llm + encoder.size
    elif not colocated:
        encoder = encoder + llm.size
    llm = np.ascontiguousarray(llm[:, place_ranks(pair.llm.pp, pair.turns)])
    modules = []
    for module, split, again in zip(job.model.modules, layers, recompute, strict=True):
        degrees, ranks = (pair.encoder, encoder) if module.is_encoder else (pair.llm, llm)
        modules.append(ModuleLayout(module.name, degrees.tp, degrees.cp, split, ranks, again))
    return checked_layout(job, modules, job.num_microbatches(pair.llm.dp))


def _llm_degrees(job: Job, ranks: int) -> Iterator[Degrees]:
    """Degrees of the LLM on that many ranks, within the request for TP, CP and DP."""
    asked = job.request
    tps = [asked.tp] if asked.tp else tensor_degrees(job, [job.model.llm])
    cps = [asked.cp] if asked.cp else [2**i for i in range(ranks.bit_length())]
    batches, uneven = divmod(job.global_batch, job.microbatch_size)
    if uneven:
        return
    dps = [asked.dp] if asked.dp else divisors(batches)
    for tp, cp in product(tps, cps):
        for dp in dps:
            pp, rest = divmod(ranks, tp * cp * dp)
            if not rest and batches % dp == 0 and 1 <= pp <= len(job.model.llm.layers):
                yield Degrees(tp, cp, pp, dp)


def draft_pairs(
    profile: Profile, samples: SampleShapes, pairs: list[Pair], *, colocated: bool, offload: bool = False
) -> Iterator[Draft]:
    """Every pair with every choice of recomputation, and of encoder offload in three phases with ``offload``."""
    job = profile.job
    # The encoders' bf16 weights leave a rank and come back over the host link.
    weight_bytes = 2 * BF16_BYTES * sum(module.parameters for module in job.model.encoders)

    @cache
    def split(index: int, num_samples: float, degrees: Degrees, turns: int = 1) -> tuple[tuple[int, ...], FloatArray]:
        module = job.model.modules[index]
        costs = average_layer_s(profile, module, samples, num_samples, degrees.tp, degrees.cp)
        layers = partition_layers(costs, turns * degrees.pp)
        return layers, stage_sums(costs, layers).reshape(turns, degrees.pp).sum(axis=0)

    @cache
    def placed(pair: Pair, layers: Layers) -> tuple[Layout, float]:
        plain = place_pair(job, pair, layers, [False] * len(layers), colocated=colocated)
        return plain, profile.programs.step_s(plain)

    def place(seconds: float, pair: Pair, layers: Layers, recompute: Sequence[bool], away: bool) -> Candidate:
        plain, step_s = placed(pair, layers)
        modules = tuple(
            replace(
                own,
                recompute=remade,
                recompute_whole=pair.at_once and remade and module.is_encoder,
                offload=away and module.is_encoder,
                widths=item_widths(job, pair) if module.is_encoder and not away else (),
            )
            for module, own, remade in zip(job.model.modules, plain.modules, recompute, strict=True)
        )
        link_s = weight_bytes / pair.encoder.tp / job.cluster.device.host_bandwidth_bytes_per_s
        return Candidate(seconds + step_s + (link_s if away else 0.0), replace(plain, modules=modules))

    for pair in pairs:
        encoder, llm, turns, *_ = pair
        count = job.num_microbatches(llm.dp)
        if turns > 1 and (llm.pp == 1 or count % llm.pp or turns * llm.pp > len(job.model.llm.layers)):
            continue
        three_phase = colocated and llm.pp > 1
        # Samples whose items an encoder replica processes at a time.
        share = job.microbatch_size * llm.dp / encoder.dp * (count if three_phase else 1)
        splits = [
            split(index, share, encoder) if module.is_encoder else split(index, job.microbatch_size, llm, turns)
            for index, module in enumerate(job.model.modules)
        ]
        layers = tuple(own for own, _ in splits)
        for recompute, away in product(recompute_choices(job), [False, True] if three_phase and offload else [False]):
            if pair.again and not all(recompute[:-1]):
                continue
            scaled = [stage * recompute_factor(remade) for (_, stage), remade in zip(splits, recompute, strict=True)]
            seconds = estimate_s(np.sum(scaled[:-1], axis=0), scaled[-1], count, colocated=colocated, turns=turns)
            yield Draft(seconds, partial(place, seconds, pair, layers, recompute, away))


def item_widths(job: Job, pair: Pair) -> tuple[tuple[int, int], ...]:
    """TP and CP of the groups in a node that may share an encoder's item; none if items stay on one replica."""
    tp = pair.encoder.tp
    most = min(pair.widest, job.cluster.gpus_per_node, job.cluster.num_ranks) // tp
    if tp & (tp - 1) or most < 2:
        return ()
    return tuple((tp, 2**i) for i in range(most.bit_length()))


def estimate_s(
    encoder: FloatArray, llm: FloatArray, num_microbatches: int, *, colocated: bool, turns: int = 1
) -> float:
    """Time of uniform microbatches without the step; seconds of both passes of each rank (three phases: of all)."""
    if not colocated:
        chain = np.concatenate([encoder, llm])
        return float(chain.sum() + (num_microbatches - 1) * chain.max())
    if len(llm) > 1:
        return float(encoder.sum() + llm.sum() / turns + (num_microbatches - 1 / turns) * llm.max())
    return float(num_microbatches * (encoder.sum() + llm.sum()))


def average_layer_s(
    profile: Profile, module: ModuleSpec, samples: SampleShapes, num_samples: float, tp: int, cp: int
) -> FloatArray:
    """Measured seconds of both passes of each layer on the average units of some samples, rounded up ``[layers]``."""
    lengths = module.lengths(samples, module.units(samples))
    if not len(lengths):
        return np.zeros(len(module.layers))
    count = max(1, ceil(num_samples * len(lengths) / len(samples) - 1e-9))
    return profile.layers.layer_s(module, np.full(count, mean_length(lengths)), tp, cp)


@dataclass(frozen=True, slots=True)
class ColocatedPlanner(TrialOptions):
    """Encoder and LLM on all ranks, each with its own TP and DP; the encoder has one stage.

    ``layout.tp``, ``cp``, ``pp`` and ``dp`` bind the LLM.

    Attributes:
        encoder_tp: TP of the encoders; None searches it.
        offload_encoder: whether encoder weights and gradients may be in host memory while the LLM runs (three phases).
        virtual_stages: numbers of LLM stages of a rank that are considered.
        recompute_encoders: whether encoders always recompute, as memory allows; ``layout.recompute`` overrides it.
        recompute_whole: whether encoders may keep no activations of layers; ``layout.recompute`` overrides it.
        widest_item: ranks of a node that may share an item, at most; for assigners that split items.
    """

    encoder_tp: int | None = None
    offload_encoder: bool = False
    virtual_stages: tuple[Count, ...] = (1,)
    recompute_encoders: bool = False
    recompute_whole: bool = False
    widest_item: Count = 1

    def plan(self, profile: Profile, make_program: MakeProgram) -> Layout:
        """The fastest of the most promising candidates that fit memory."""
        samples = profile.samples.draw(self.profile_samples)

        is_free = profile.job.request.recompute is None
        always = self.recompute_encoders and is_free
        whole = (True, False) if self.recompute_encoders else (False, True)[: 1 + (self.recompute_whole and is_free)]

        def candidates(turns: int, at_once: bool, sized: Profile) -> Iterator[Candidate]:
            pairs = list_pairs(sized.job, colocated=True, encoder_tp=self.encoder_tp)
            again = always or (at_once and is_free)
            pairs = [Pair(*pair[:2], turns, at_once, self.widest_item, again) for pair in pairs]
            return rising_candidates(draft_pairs(sized, samples, pairs, colocated=True, offload=self.offload_encoder))

        sets = product(whole, self.virtual_stages)
        first, *others = (partial(candidates, turns, at_once) for at_once, turns in sets)
        return chosen_layout(profile, first, make_program, self.num_trials, others)


@dataclass(frozen=True, slots=True)
class NoncolocatedPlanner(TrialOptions):
    """An encoder island and the LLM on disjoint ranks; together they use all ranks.

    ``layout.tp``, ``cp`` and ``dp`` bind the LLM; ``layout.pp`` counts the stages of both.

    Attributes:
        encoder_ranks: size of the island; None searches parts of a node and whole nodes up to half of the cluster.
        encoder_tp: TP of the encoders; None searches it.
    """

    encoder_ranks: Count | None = None
    encoder_tp: int | None = None

    def plan(self, profile: Profile, make_program: MakeProgram) -> Layout:
        """The fastest of the most promising candidates that fit memory."""
        if self.encoder_ranks is not None:
            most = profile.job.cluster.num_ranks - 1
            require(self.encoder_ranks <= most, "strategy.planner.encoder_ranks", self.encoder_ranks, f"at most {most}")
        samples = profile.samples.draw(self.profile_samples)
        listed = partial(list_pairs, colocated=False, encoder_ranks=self.encoder_ranks, encoder_tp=self.encoder_tp)
        if not profile.job.free_microbatch_size:
            # The tuner asks for few degrees at a time; that all are too many should be known before.
            listed(profile.job)

        def candidates(sized: Profile) -> Iterator[Candidate]:
            return rising_candidates(draft_pairs(sized, samples, listed(sized.job), colocated=False))

        return chosen_layout(profile, candidates, make_program, self.num_trials)


@dataclass(frozen=True, slots=True)
class BatchSlices:
    """Samples in arrival order; an LLM replica's items in contiguous slices over the encoder replicas that feed it.

    Slices cut one LLM microbatch's items, or all of a replica's in three phases (arXiv:2605.27678, section 1).

    Attributes:
        encoder_passes: chunks of an encoder replica's window in the three-phase schedule; the paper runs one.
    """

    encoder_passes: Count = 1

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Replica and microbatch from the position in the batch alone."""
        job = profile.job
        *encoders, llm = layout.modules
        replica, microbatch = arrival_places(len(shapes), job.microbatch_size, llm.dp)
        modules = []
        for module, placed in zip(job.model.encoders, encoders, strict=True):
            ratio = find_ratio(placed, llm)
            owner = shapes.item_sample[module.units(shapes)]
            group = replica[owner] // ratio.fan_out
            if is_colocated(placed, llm) and llm.pp > 1:
                encoder = group * ratio.fan_in + slice_rows(group, ratio.fan_in)
                passes = slice_rows(encoder, self.encoder_passes)
            else:
                passes = microbatch[owner]
                row = group * (1 + int(microbatch.max(initial=0))) + passes
                encoder = group * ratio.fan_in + slice_rows(row, ratio.fan_in)
            modules.append(ModuleAssignment(encoder, passes))
        return Assignment((*modules, ModuleAssignment(replica, microbatch)))


def slice_rows(row: IntArray, num_slices: int) -> IntArray:
    """Slice of each unit when the units of each row, in order, are cut into slices that differ by at most one unit."""
    return np.asarray(place_in_group(row) * num_slices // np.bincount(row)[row])


@dataclass(frozen=True, slots=True)
class ColocatedScheduler(Recomputation):
    """Encoder and LLM on the same ranks, each with its own grid.

    LLM PP = 1: each microbatch in turn through encoder, LLM and back. LLM PP > 1: three phases.
    """

    def schedule(self, shapes: SampleShapes, layout: Layout, assignment: Assignment, profile: Profile) -> Program:
        """The program; ``IncompatibleError`` if an encoder is not on exactly the LLM's ranks or a route is wrong."""
        check_colocated(layout)
        model = profile.job.model
        one_stage = layout.modules[-1].pp == 1
        check_routes(model, shapes, layout, assignment, in_order=one_stage)
        if not one_stage:
            return self.within_memory(three_phase_program(model, shapes, layout, assignment), profile)
        warmup = [np.zeros(1, np.int64)] * len(layout.modules)
        return self.within_memory(chain_program(model, shapes, layout, assignment, warmup), profile)


@dataclass(frozen=True, slots=True)
class GraphAwareScheduler(OneForwardOneBackward):
    """1F1B over the stages of an encoder island and of the LLM, whose ranks are disjoint."""

    handles_generators: ClassVar[bool] = False

    def schedule(self, shapes: SampleShapes, layout: Layout, assignment: Assignment, profile: Profile) -> Program:
        """The program; ``IncompatibleError`` if an encoder shares ranks with the LLM or an item takes a wrong route."""
        *encoders, llm = layout.modules
        for placed in encoders:
            if not is_disjoint(placed, llm):
                raise IncompatibleError(
                    f"layout: a disjoint schedule needs {placed.module} and {llm.module} on different ranks"
                )
        check_routes(profile.job.model, shapes, layout, assignment, in_order=True)
        return self.in_chain(shapes, layout, assignment, profile)
