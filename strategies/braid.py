"""Braid, this project's own: LPT on groups of several widths, and in pipelines with virtual stages where they pay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Annotated, ClassVar, NamedTuple

import numpy as np

from entrain_bench.balancing.candidates import Candidate, Draft, by_estimate, rising_candidates
from entrain_bench.balancing.chunk_estimates import packed_iteration_s
from entrain_bench.balancing.interface import MakeProgram
from entrain_bench.balancing.planning import (
    average_layer_s,
    chain_starts,
    place_chain,
    place_ranks,
    recompute_choices,
    recompute_factor,
    stage_sums,
)
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.rounds import even_layers, layouts_with_widths
from entrain_bench.balancing.tuning import Candidates, tuned
from entrain_bench.base.arrays import FloatArray
from entrain_bench.base.errors import UserError
from entrain_bench.program.assignment import Assignment
from entrain_bench.program.layout import Layout
from entrain_bench.specs.job import Degrees
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.parse import Allowed, Count
from entrain_bench.specs.shapes import SampleShapes

from .lpt import LongestFirst
from .lpt_widths import LastRound, LongestFirstOnWidths

# Options of a plan whose groups of several widths share their last round.
SHARED_LAST_ROUND = ("strategy.assigner.last_round=shared",)

type Layers = Sequence[tuple[int, ...]]
"""Layers of each stage, for every module of the model."""


@dataclass(frozen=True, slots=True)
class BraidPlanner:
    """Lets pipelines and groups of several widths compete in simulated batches.

    Attributes:
        widths: whether groups of several widths compete.
        virtual_stages: stages of each rank of a pipeline that are considered; above 1 it is interleaved.
        profile_samples: samples averaged into one shape, which rates pipelines.
        num_trials: simulated batches with ``tuning=own``.
    """

    handles_generators: ClassVar[bool] = True
    widths: bool = True
    virtual_stages: Annotated[tuple[Count, ...], Allowed(bool, "a list with a number")] = (1, 2, 4, 8)
    profile_samples: Count = 256
    num_trials: Count = 48

    def plan(self, profile: Profile, make_program: MakeProgram) -> Layout:
        """The layout that runs the tuning batches fastest; ``UserError`` says why nothing fits."""
        samples = profile.samples.draw(self.profile_samples)
        single = profile.for_job(profile.job.with_microbatch_size(1))

        @cache
        def layer_s(tp: int, cp: int) -> list[FloatArray]:
            return average_layer_s(single, samples, tp, cp)

        @cache
        def splits(tp: int, cp: int, pp: int, turns: int, again: tuple[bool, ...]) -> list[Split]:
            return list_splits(profile.job.model, layer_s(tp, cp), pp, turns, again)

        def pipelines(turns: int, sized: Profile) -> Iterator[Candidate]:
            return rising_candidates(chains(sized, splits, turns, later=make_program.chooses_recomputation))

        sets: list[Candidates] = [partial(pipelines, turns) for turns in self.virtual_stages]
        offers = list[Candidate]()
        if self.widths:
            offers = offers_with_widths(profile, profile.samples.draw(profile.job.global_batch), make_program)
            sets.insert(0, lambda _: offers)
        return tuned(profile, sets, make_program, profile.tuning_budget or self.num_trials, holds=bool(offers))


def offers_with_widths(profile: Profile, batch: SampleShapes, make_program: MakeProgram) -> list[Candidate]:
    """Return one-stage layouts with groups of several widths and whole weights, by estimates of the batch's program."""
    offers = []
    for plain, options in product(layouts_with_widths(profile.job), ((), SHARED_LAST_ROUND)):
        layout = replace(plain, options=options)
        if has_room(profile, layout):
            with suppress(UserError):
                program = make_program.draft(batch, layout)
                offers.append(Candidate(packed_iteration_s(program, profile), layout))
    return by_estimate(offers)


class Split(NamedTuple):
    """Layers of stages that are in turn on the ranks of a pipeline."""

    layers: Layers
    leading: bool  # as for ``place_chain``
    busiest_s: float  # seconds of a mean sample on the busiest rank
    fill_s: float  # to fill and drain the pipeline with single samples


def list_splits(
    model: ModelSpec, layer_s: Sequence[FloatArray], pp: int, turns: int, again: Sequence[bool]
) -> list[Split]:
    """Return the balanced splits of a pipeline over ``pp`` ranks; ``layer_s`` are without recomputation."""
    places = place_ranks(pp, turns)
    module_s = [values * recompute_factor(remade) for values, remade in zip(layer_s, again, strict=True)]
    splits = []
    for layers, leading in even_layers(model, module_s, len(places)):
        stage_s = np.zeros(len(places))
        firsts = chain_starts(model, len(places), layers, leading)
        for first, values, split in zip(firsts, module_s, layers, strict=True):
            stage_s[first : first + len(split)] += stage_sums(values, split)
        rank_s = np.bincount(places, weights=stage_s)
        splits.append(Split(layers, leading, float(rank_s.max()), float((rank_s.sum() - rank_s.max()) / turns)))
    return splits


def chains(profile: Profile, splits: Callable[..., list[Split]], turns: int, *, later: bool) -> Iterator[Draft]:
    """Return layouts of equal replicas, each a chain of stages that cycles over its ranks ``turns`` times.

    Their estimates add the busiest rank's seconds for mean samples, fill and drain, and the step. ``splits`` are
    ``list_splits`` at a TP and CP. The assigner chooses the number of microbatches.
    """
    job = profile.job

    def place(passes_s: float, degrees: Degrees, split: Split, again: Sequence[bool]) -> Candidate:
        layout = place_chain(job, degrees, split.layers, again, split.leading, turns)
        layout = replace(layout, num_microbatches=1)
        return Candidate(passes_s + profile.programs.step_s(layout), layout)

    for degrees in job.degrees():
        if turns > 1 and degrees.pp == 1:
            continue
        for again in recompute_choices(job, chosen_later=later):
            for split in splits(degrees.tp, degrees.cp, degrees.pp, turns, again):
                passes_s = float(job.global_batch / degrees.dp * split.busiest_s + split.fill_s)
                yield Draft(passes_s, partial(place, passes_s, degrees, split, again))


def has_room(profile: Profile, layout: Layout) -> bool:
    """Return whether states leave memory for activations."""
    return bool(profile.memory.lane_state_bytes(layout).max() <= profile.job.planning_budget_bytes)


@dataclass(frozen=True, slots=True)
class BraidAssigner:
    """Deals by ``lpt_widths`` where the layout has several widths, otherwise by ``lpt``.

    Attributes:
        last_round: as for ``lpt_widths``; the planner offers both.
    """

    handles_generators: ClassVar[bool] = True
    handles_widths: ClassVar[bool] = True
    chooses_microbatches: ClassVar[bool] = True
    last_round: LastRound = "own"

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Labels of all units."""
        dealer = LongestFirstOnWidths(self.last_round) if layout.modules[0].widths else LongestFirst()
        return dealer.assign(shapes, layout, profile)
