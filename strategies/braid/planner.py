"""The layout: groups of several widths by believed programs; pipelines by their busiest rank, the best on trial."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np

from entrain_bench.balancing.candidates import Candidate, Draft, fastest_in_trials, rising_candidates
from entrain_bench.balancing.chunk_estimates import packed_units_s
from entrain_bench.balancing.interface import MakeProgram
from entrain_bench.balancing.options import check_least
from entrain_bench.balancing.planning import chain_bytes, recompute_choices
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.rounds import layouts_with_widths
from entrain_bench.balancing.tuning import Candidates, default_job, tuned
from entrain_bench.base.arithmetic import decisive, matmul
from entrain_bench.base.errors import UserError, require
from entrain_bench.program.layout import Layout
from entrain_bench.specs.shapes import SampleShapes

from .braid_layouts import Shape, ShapeWork, list_chains, list_shapes, place, split_layers
from .packs import fastest_packs

# Shapes are considered whose rating is at most so many times the best of a job with fixed degrees, and of jobs before.
WORST = 1.3
HOPELESS = 2.0
# Layouts with widths are compared on so many drawn batches: on more if those have fewer samples than the first number.
# From there on a layout is dropped if it takes so many times as long as the best.
BATCHES = 3
FEW = 512
NEAR = 1.05
# Of larger batches there are fewer, drawn for a part of the job with at least so many ranks.
MANY = 6144
PART = 256
# No pipelines are planned if the best layout with widths takes at most so many times its work evenly shared.
PIPELINED = 1.5
# Ranks up to which pipelines have the whole budget of simulated batches. Batches of more ranks take longer, and the
# budget shrinks as their number grows, down to the second number.
RANKS = 64
FEWEST = 12
# Simulated batches for chains, of models with a generator: its copies on every block take memory that others lack.
CHAINS = 8


@dataclass(frozen=True, slots=True)
class BraidPlanner:
    """Encoders and LLM on all ranks of a replica; with a generator also chains (``Shape.chain``).

    Attributes:
        widths: whether a sample may take a group of any width; otherwise all layouts have one TP and CP.
        profile_samples: samples that stand for a batch.
        overhead: share of an encoder chunk's time that a chunk costs anyway, as the planner counts on.
        encoder_degrees: whether encoders have TP and CP of their own.
        spans: numbers of the LLM's blocks that a stage of an encoder may then take besides one.
        encoder_copies: whether a replica may hold several copies of an encoder along its pipeline.
        microbatches: multiples of the job's number of microbatches that are considered.
        llm_stages: whether the LLM may have fewer stages than a replica has blocks.
        num_trials: simulated batches for pipelines with ``tuning=own``; fewer above ``RANKS`` ranks.
    """

    handles_generators: ClassVar[bool] = True

    widths: bool = True
    profile_samples: int = 1024
    overhead: float = 0.05
    encoder_degrees: bool = True
    spans: tuple[int, ...] = (2, 4)
    encoder_copies: bool = True
    microbatches: tuple[float, ...] = (1, 2, 4)
    llm_stages: bool = True
    num_trials: int = 48

    def __post_init__(self) -> None:
        require(0 < self.overhead < 1, "strategy.planner.overhead", self.overhead, "above 0 and below 1")
        check_least(self, "strategy.planner", 1, "profile_samples", "num_trials")
        wide = [*self.spans]
        require(not wide or min(wide) >= 2, "strategy.planner.spans", wide, "numbers of 2 or more")
        factors = [*self.microbatches]
        require(bool(factors) and min(factors) > 0, "strategy.planner.microbatches", factors, "numbers above 0")

    def plan(self, profile: Profile, make_program: MakeProgram) -> Layout:
        """Groups of the widths that end first by belief, or the layout that the tuner finds.

        Pipelines compete only if groups of several widths, where the job allows them, leave ranks idle for long. With a
        generator, the fastest chain on trial competes with what the tuner finds.
        """
        profile = profile.smoothed()
        wide, even_s = self._with_widths(profile)
        if wide and decisive(wide[0].estimated_s) <= decisive(PIPELINED * even_s):
            return wide[0].layout
        draft = make_program.draft
        sizes = profile.job.free_microbatch_size
        default = default_job(profile.job)
        one_size = replace(self, microbatches=(1,))
        best_s = {True: np.inf, False: np.inf}
        work = ShapeWork(profile, profile.samples.draw(self.profile_samples), self.overhead)

        def candidates(chain: bool, cut: float, sized: Profile) -> Iterator[Candidate]:
            later = draft.chooses_recomputation
            # Where sizes are free, another job has them; the default job is answered as if it were given.
            request = replace(sized.job.request, recompute=profile.job.request.recompute)
            planner = one_size if sizes and replace(sized.job, request=request) != default else self
            for candidate in planner.rated(sized, work, later, chain, cut * best_s[chain]):
                if candidate.estimated_s < best_s[chain] and has_room(profile, candidate.layout):
                    best_s[chain] = candidate.estimated_s
                yield candidate

        budget = self.num_trials if profile.tuning_budget is None else profile.tuning_budget
        budget = max(min(budget, FEWEST), budget * RANKS // max(RANKS, profile.job.cluster.num_ranks))

        def found(limit_s: float = np.inf, spent: int = 0) -> Layout:
            # Layouts with widths compete if they are believed to take less.
            near = [candidate for candidate in wide if decisive(candidate.estimated_s) < limit_s]

            def under(cut: float) -> Layout:
                sets: list[Candidates] = [partial(candidates, False, cut), *([lambda _: near] if near else [])]
                return tuned(profile, sets, make_program, max(1, budget - spent))

            try:
                return under(HOPELESS)
            except UserError:
                # The best may not fit memory; what does may be far from them.
                return under(np.inf)

        if not profile.job.model.generators:
            return found()
        try:
            chain = fastest_in_trials(profile, partial(candidates, True, HOPELESS), make_program, CHAINS)
        except UserError:
            return found()
        batch = profile.samples.draw(profile.job.global_batch)
        chain_s = decisive(profile.trial_s(make_program(batch, chain)))
        with suppress(UserError):
            other = found(chain_s, CHAINS)
            chain = chain if chain_s <= decisive(profile.trial_s(make_program(batch, other))) else other
        return chain

    def _with_widths(self, profile: Profile) -> tuple[list[Candidate], float]:
        """Layouts whose groups have several widths, by rising estimate, and seconds of their work evenly shared.

        An estimate is the mean over drawn batches; only layouts near the best have more than a few.
        """
        start = profile.samples.state
        offers = list[Candidate]()
        part = shrink_job(profile)
        size = part.job.global_batch
        count = min(max(BATCHES, FEW // size), max(1, MANY // size)) if self.widths else 0
        batches = [profile.samples.draw(size) for _ in range(count)]
        profile.samples.restore(start)
        best = np.full(count, np.inf)
        for layout, part_layout in offered_pairs(profile, part) if count else ():
            # No round is shorter than its gathers.
            if not has_room(profile, layout) or gathers_s(profile, layout) > NEAR * best.mean():
                continue
            # Collectives of all ranks take longer than those of a part.
            more_s = profile.programs.step_s(layout) - part.programs.step_s(part_layout)
            more_s += gathers_s(profile, layout) - gathers_s(part, part_layout)
            seconds = np.zeros(0)
            for samples in batches:
                seconds = np.append(seconds, more_s + fastest_packs(samples, part_layout, part)[0])
                is_near = seconds.mean() <= NEAR * best[: len(seconds)].mean()
                if np.isinf(seconds[-1]) or (len(seconds) * size >= FEW and not is_near):
                    break
            else:
                offers.append(Candidate(float(seconds.mean()), layout))
                best = min(best, seconds, key=np.mean)
        even_s = min((evenly_s(samples, part) for samples in batches), default=np.inf)
        return sorted(offers, key=lambda candidate: decisive(candidate.estimated_s)), even_s

    def rated(
        self, profile: Profile, work: ShapeWork, recompute_later: bool, chain: bool = False, most_s: float = np.inf
    ) -> Iterator[Candidate]:
        """Layouts that could be among the best, by the seconds of their busiest rank, or longest sample, and step."""
        job = profile.job
        # A chain's first block has the encoders besides: what recomputes decides how many of the LLM's layers it has.
        choices = recompute_choices(job, chosen_later=recompute_later and not chain)
        plain = list_chains(job, choices) if chain else list_shapes(job, choices, self)
        shapes = [replace(shape, num_microbatches=count) for shape in plain for count in self._counts(profile, shape)]

        def placed(shape: Shape, layers: Sequence[tuple[int, ...]], passes_s: float) -> Candidate:
            layout = place(job, shape, layers)
            fits = not shape.chain or chain_bytes(profile, work.samples, layout) <= job.planning_budget_bytes
            return Candidate(passes_s + profile.programs.step_s(layout) if fits else np.inf, layout)

        def divided(shape: Shape) -> Draft:
            layers, busiest_s = split_layers(work, shape)
            # The first microbatch fills a chain and the last one drains it; copies of encoders have work meanwhile.
            bubble = (shape.degrees.pp - 1) / shape.num_microbatches * shape.chain
            passes_s = max(busiest_s * (1.0 + bubble), work.longest_s(shape))
            return Draft(passes_s, partial(placed, shape, layers, passes_s))

        drafts = (Draft(work.least_s(shape), partial(divided, shape)) for shape in shapes)
        best_s = np.inf
        for candidate in rising_candidates(drafts, most_s):
            best_s = min(best_s, candidate.estimated_s)
            if decisive(candidate.estimated_s) > decisive(WORST * best_s):
                return
            yield candidate

    def _counts(self, profile: Profile, shape: Shape) -> list[int]:
        """Numbers of microbatches to consider: a replica has a sample for each."""
        job = profile.job
        dp = shape.degrees.dp
        most = job.global_batch // dp
        return sorted({min(most, max(1, round(job.num_microbatches(dp) * factor))) for factor in self.microbatches})


def shrink_job(profile: Profile) -> Profile:
    """Return the profile of a half, a quarter, ... of a job's nodes and batch if the batch exceeds ``MANY`` samples.

    The part has the job's layouts: it keeps ``PART`` ranks, and states have room where they have room on all ranks. A
    job with requested CP or DP has no parts.
    """
    job = profile.job
    parts = 1
    nodes = job.cluster.num_nodes
    ranks = job.cluster.num_ranks
    size = job.global_batch
    while size > parts * MANY and ranks >= 2 * parts * PART and nodes % (2 * parts) == size % (2 * parts) == 0:
        parts *= 2
    while parts > 1 and not (job.request.cp or job.request.dp):
        part = profile.for_job(
            replace(job, cluster=replace(job.cluster, num_nodes=nodes // parts), global_batch=size // parts)
        )
        if all(
            has_room(profile, whole) == has_room(part, part_layout)
            for whole, part_layout in offered_pairs(profile, part)
        ):
            return part
        parts //= 2
    return profile


def offered_pairs(profile: Profile, part: Profile) -> Iterator[tuple[Layout, Layout]]:
    """Layouts of a job with groups of several widths, and the same of its part."""
    part_layouts = [*layouts_with_widths(part.job)]
    return zip(part_layouts if part is profile else layouts_with_widths(profile.job), part_layouts, strict=True)


def evenly_s(samples: SampleShapes, profile: Profile) -> float:
    """Believed seconds of a batch if all ranks shared its work evenly, at the rate of whole layers on a rank."""
    work_s = 0.0
    for module in profile.job.model.modules:
        added = packed_units_s(module, samples, 1, 1, profile).sum(axis=(0, 1))
        work_s += float(matmul(added, np.bincount(module.layer_kind, minlength=len(module.kinds))))
    return work_s / profile.job.cluster.num_ranks


def gathers_s(profile: Profile, layout: Layout) -> float:
    """Seconds that a round's gathers and scatters of sharded weights take; 0 if they are not sharded."""
    pairs = [pair for pair in zip(profile.job.model.modules, layout.modules, strict=True) if pair[1].sharded]
    traffic = [profile.layers.traffic(*pair) for pair in pairs]
    return float(sum((layers.gather_s + layers.again_s + layers.scatter_s).sum() for layers in traffic))


def has_room(profile: Profile, layout: Layout) -> bool:
    """Whether states leave room for anything else."""
    return bool(profile.memory.lane_state_bytes(layout).max() <= profile.job.planning_budget_bytes)
