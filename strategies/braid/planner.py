"""The layout: groups of several widths by believed programs; pipelines by their busiest rank, the best on trial.

In a pipeline the LLM is on all blocks of a replica, every other module in copies over runs of the same blocks; or all
modules form chains. "Encoder" includes generators.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Annotated, ClassVar

import numpy as np

from entrain_bench.balancing.candidates import Candidate, Draft, fastest_in_trials, rising_candidates
from entrain_bench.balancing.chunk_estimates import packed_units_s
from entrain_bench.balancing.interface import MakeProgram
from entrain_bench.balancing.planning import chain_bytes, partition_layers, place_chain, recompute_choices, stage_sums
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.rounds import layouts_with_widths
from entrain_bench.balancing.tuning import Candidates, default_job, tuned
from entrain_bench.base.arithmetic import decisive, matmul
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.base.errors import UserError
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.specs.job import Degrees, Job, divisors
from entrain_bench.specs.parse import Allowed, Count, Rate, at_least
from entrain_bench.specs.shapes import SampleShapes

from .assigner import chunk_layers_s, chunk_tokens, others, split_evenly, unit_layers_s
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
class Shape:
    """The choices that determine a layout."""

    degrees: Degrees  # TP, CP and DP of the LLM, and the blocks of a replica
    # Of the encoders; their product divides that of the LLM, or is a multiple of it: a stage of an encoder then takes
    # several blocks.
    encoder_tp: int
    encoder_cp: int
    segments: int  # runs of blocks, each with a copy of every encoder (or several side by side)
    llm_stages: int  # of the LLM, on every ``llm_stride``-th block from the first
    llm_stride: int
    recompute: tuple[bool, ...]  # modules that recompute their activations
    num_microbatches: int  # of an LLM replica
    # Whether encoders are on the first block only and generators on the last, whole: one copy of each.
    chain: bool = False

    @property
    def copies_abreast(self) -> int:
        """Copies of an encoder on one run of blocks."""
        return max(1, self.degrees.tp * self.degrees.cp // (self.encoder_tp * self.encoder_cp))

    @property
    def blocks_abreast(self) -> int:
        """Blocks that a stage of an encoder takes."""
        return max(1, self.encoder_tp * self.encoder_cp // (self.degrees.tp * self.degrees.cp))

    @property
    def encoder_stages(self) -> int:
        """Stages of a copy of an encoder."""
        return self.degrees.pp // (self.segments * self.blocks_abreast)

    @property
    def llm_blocks(self) -> IntArray:
        """Blocks of the LLM's stages."""
        return np.arange(self.llm_stages) * self.llm_stride


def encoder_degrees(job: Job, degrees: Degrees, planner: BraidPlanner) -> Iterator[tuple[int, int]]:
    """TP and CP that encoders may have: that of the LLM, those of a part of its block, and those of several blocks."""
    modules = others(job.model)
    sizes = [size for module in modules.values() for size in module.sharded_sizes.values()]
    if all(size % degrees.tp == 0 for size in sizes):
        yield degrees.tp, degrees.cp
    if not planner.encoder_degrees or not modules:
        return
    inside = [(tp, cp) for tp in reversed(divisors(degrees.tp)) for cp in divisors(degrees.tp * degrees.cp // tp)]
    wide = [blocks for blocks in planner.spans if degrees.pp % blocks == 0]
    across = [
        pair for blocks in wide for pair in ((degrees.tp, degrees.cp * blocks), (degrees.tp * blocks, degrees.cp))
    ]
    for tp, cp in (*inside, *across):
        splits = cp == 1 or all(job.framework.sequence_parts(module, cp) == cp for module in modules.values())
        fits = job.cluster.gpus_per_node % tp == 0 and all(size % tp == 0 for size in sizes)
        if splits and fits and (tp, cp) != (degrees.tp, degrees.cp):
            yield tp, cp


@dataclass(frozen=True, slots=True)
class _ModuleWork:
    """Work of an iteration for a module with given degrees, all replicas together."""

    units_s: FloatArray  # seconds of each layer by its units ``[layers]``
    chunk_s: FloatArray  # by a chunk besides ``[layers]``
    num_chunks: int  # chunks of an encoder at least; 0 for the LLM
    longest_s: FloatArray  # of each sample's longest unit, through all layers ``[samples]``


@dataclass(frozen=True, slots=True)
class ShapeWork:
    """Estimated work of each module in an iteration, from samples that stand for a batch."""

    profile: Profile
    samples: SampleShapes
    _known: dict[tuple[int, int, int, bool], _ModuleWork] = field(init=False, default_factory=dict)

    def _of(self, index: int, tp: int, cp: int, recompute: bool) -> _ModuleWork:
        key = (index, tp, cp, recompute)
        if key not in self._known:
            job = self.profile.job
            module = self.profile.job.model.modules[index]
            units_s = unit_layers_s(self.profile, module, self.samples, tp, cp, recompute)
            whole_s = matmul(units_s, np.bincount(module.layer_kind, minlength=len(module.kinds)))
            longest = np.zeros(len(self.samples))
            units = module.units(self.samples)
            scale = job.global_batch / len(self.samples)
            np.maximum.at(longest, module.owners(self.samples, units), whole_s)
            chunk_s = chunk_layers_s(self.profile, module, tp, cp, recompute)
            num_chunks = 0
            if module.per_item:
                lengths = module.lengths(self.samples, units)
                one = chunk_tokens(self.profile, module, lengths, tp, cp)
                num_chunks = round(float(lengths.sum()) * scale / one)
            kinds = module.layer_kind
            self._known[key] = _ModuleWork((units_s.sum(axis=0) * scale)[kinds], chunk_s[kinds], num_chunks, longest)
        return self._known[key]

    def layers_s(self, shape: Shape, index: int) -> FloatArray:
        """Seconds of each layer of a module in an iteration of one LLM replica, on one of its blocks ``[layers]``."""
        module = self.profile.job.model.modules[index]
        chunks = shape.num_microbatches * shape.degrees.dp
        tp = shape.degrees.tp
        cp = shape.degrees.cp
        if module.per_item:
            tp = shape.encoder_tp
            cp = shape.encoder_cp
        module_work = self._of(index, tp, cp, shape.recompute[index])
        return np.asarray(
            (module_work.units_s + max(module_work.num_chunks, chunks) * module_work.chunk_s) / shape.degrees.dp
        )

    def longest_s(self, shape: Shape) -> float:
        """Seconds of the sample that takes longest, forth and back: its longest items, before the LLM and after it."""
        model = self.profile.job.model
        degrees = shape.degrees
        llm = self.profile.job.model.llm_index
        before, behind = np.zeros((2, len(self.samples)))
        for index in others(model):
            longest_unit_s = self._of(index, shape.encoder_tp, shape.encoder_cp, shape.recompute[index]).longest_s
            longest = before if index < llm else behind
            np.maximum(longest, longest_unit_s, out=longest)
        between = self._of(llm, degrees.tp, degrees.cp, shape.recompute[llm]).longest_s
        return float((before + between + behind).max())

    def least_s(self, shape: Shape) -> float:
        """No split makes an iteration of a shape shorter: all work, evenly on all blocks; and the longest sample."""
        lanes = shape.degrees.pp
        total = self.layers_s(shape, self.profile.job.model.llm_index).sum() / lanes
        for index in others(self.profile.job.model):
            copies = shape.copies_abreast * lanes // shape.blocks_abreast
            total += self.layers_s(shape, index).sum() / copies
        return max(float(total), self.longest_s(shape))


def split_layers(work: ShapeWork, shape: Shape) -> tuple[list[tuple[int, ...]], float]:
    """Layers of every module's stages, split evenly, and believed seconds on the busiest rank."""
    llm = work.profile.job.model.llm_index
    encoders_s = [work.layers_s(shape, index) for index in others(work.profile.job.model)]
    if shape.chain:
        loaded_s = work.layers_s(shape, llm).copy()
        whole = [(len(layer_s),) for layer_s in encoders_s]
        loaded_s[[0, -1]] += [sum(map(np.sum, encoders_s[:llm])), sum(map(np.sum, encoders_s[llm:]))]
        layers = partition_layers(loaded_s, shape.llm_stages)
        return [*whole[:llm], layers, *whole[llm:]], float(stage_sums(loaded_s, layers).max())
    llm_bounds, bounds, busiest_s = split_evenly(
        work.layers_s(shape, llm),
        np.concatenate([np.zeros(0), *encoders_s]),
        np.cumsum([0, *map(len, encoders_s)]),
        shape.llm_blocks,
        (shape.segments, shape.encoder_stages, shape.blocks_abreast),
        shape.copies_abreast,
    )
    chain = [tuple(np.diff(bound).tolist()) for bound in bounds]
    chain.insert(llm, tuple(np.diff(llm_bounds).tolist()))
    return chain, float(busiest_s)


def place(job: Job, shape: Shape, layers: Sequence[tuple[int, ...]]) -> Layout:
    """The layout of a shape; replicas are consecutive ranks, blocks of TP x CP ranks inside."""
    degrees = shape.degrees
    width = shape.encoder_tp * shape.encoder_cp
    if shape.chain:
        chain = place_chain(job, degrees, layers, shape.recompute, False)
        return replace(chain, num_microbatches=shape.num_microbatches)
    ranks = np.arange(degrees.dp * degrees.pp * degrees.tp * degrees.cp)
    blocks = ranks.reshape(degrees.dp, degrees.pp, degrees.tp * degrees.cp)
    runs = ranks.reshape(degrees.dp, shape.segments, shape.encoder_stages, shape.copies_abreast, width)
    copies = runs.transpose(0, 1, 3, 2, 4).reshape(-1, shape.encoder_stages, width)
    modules = []
    for module, split, again in zip(job.model.modules, layers, shape.recompute, strict=True):
        if module.per_item:
            held = copies[:, : len(split)]
            tp = shape.encoder_tp
            cp = shape.encoder_cp
        else:
            held = blocks[:, shape.llm_blocks]
            tp = degrees.tp
            cp = degrees.cp
        modules.append(ModuleLayout(module.name, tp, cp, split, np.ascontiguousarray(held), again))
    return Layout(tuple(modules), shape.num_microbatches)


def llm_places(job: Job, degrees: Degrees, spread: bool) -> list[tuple[int, int]]:
    """Numbers of the LLM's stages and blocks from one to the next: on every block as far as it has layers.

    If ``spread`` also on half, a quarter, ... of the blocks, next to each other or spread over the replica.
    """
    layers = len(job.model.llm.layers)
    lanes = degrees.pp
    choices = [(min(lanes, layers), 1)]
    for count in reversed(divisors(lanes)[:-1]) if spread and others(job.model) else ():
        if count <= layers:
            choices += [(count, 1), (count, lanes // count)]
    return [*dict.fromkeys(choices)]


def list_shapes(job: Job, choices: Sequence[tuple[bool, ...]], planner: BraidPlanner) -> Iterator[Shape]:
    """Every shape of a job's degrees and of some choices of recomputation, with the microbatches of its size."""
    model = job.model
    fewest = min((len(module.layers) for module in others(model).values()), default=0)
    for degrees in job.degrees():
        if any(size % degrees.tp for size in model.llm.sharded_sizes.values()):
            continue
        if not fewest and len(model.llm.layers) < degrees.pp:
            continue
        for (tp, cp), again in product(encoder_degrees(job, degrees, planner), choices):
            stages = degrees.pp * degrees.tp * degrees.cp // max(tp * cp, degrees.tp * degrees.cp)
            runs = divisors(stages) if planner.encoder_copies and fewest else [1]
            runs = [run for run in runs if not fewest or stages // run <= fewest]
            for segments, (count, stride) in product(runs, llm_places(job, degrees, planner.llm_stages)):
                microbatches = job.num_microbatches(degrees.dp)
                yield Shape(degrees, tp, cp, segments, count, stride, again, microbatches)


def list_chains(job: Job, choices: Sequence[tuple[bool, ...]]) -> Iterator[Shape]:
    """Every shape whose encoders are on the first of a replica's blocks and whose generators are on the last."""
    sizes = [size for module in job.model.modules for size in module.sharded_sizes.values()]
    for degrees, again in product(job.degrees(), choices):
        tp = degrees.tp
        cp = degrees.cp
        pp = degrees.pp
        if 1 < pp <= len(job.model.llm.layers) and all(size % tp == 0 for size in sizes):
            yield Shape(degrees, tp, cp, 1, pp, 1, again, job.num_microbatches(degrees.dp), chain=True)


@dataclass(frozen=True, slots=True)
class BraidPlanner:
    """Encoders and LLM on all ranks of a replica; with a generator also chains (``Shape.chain``).

    Attributes:
        widths: whether a sample may take a group of any width; otherwise all layouts have one TP and CP.
        profile_samples: samples that stand for a batch.
        encoder_degrees: whether encoders have TP and CP of their own.
        spans: numbers of the LLM's blocks that a stage of an encoder may then take besides one.
        encoder_copies: whether a replica may hold several copies of an encoder along its pipeline.
        microbatches: multiples of the job's number of microbatches that are considered.
        llm_stages: whether the LLM may have fewer stages than a replica has blocks.
        num_trials: simulated batches for pipelines with ``tuning=own``; fewer above ``RANKS`` ranks.
    """

    handles_generators: ClassVar[bool] = True
    widths: bool = True
    profile_samples: Count = 1024
    encoder_degrees: bool = True
    spans: tuple[Annotated[int, at_least(2)], ...] = (2, 4)
    encoder_copies: bool = True
    microbatches: Annotated[tuple[Rate, ...], Allowed(bool, "a list with a number")] = (1, 2, 4)
    llm_stages: bool = True
    num_trials: Count = 48

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
        work = ShapeWork(profile, profile.samples.draw(self.profile_samples))

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

        def sized(shape: Shape) -> list[Shape]:
            # A replica has a sample for each microbatch.
            most = job.global_batch // shape.degrees.dp
            counts = {min(most, max(1, round(shape.num_microbatches * factor))) for factor in self.microbatches}
            return [replace(shape, num_microbatches=count) for count in sorted(counts)]

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

        drafts = (
            Draft(work.least_s(shape), partial(divided, shape)) for plain_shape in plain for shape in sized(plain_shape)
        )
        best_s = np.inf
        for candidate in rising_candidates(drafts, most_s):
            best_s = min(best_s, candidate.estimated_s)
            if decisive(candidate.estimated_s) > decisive(WORST * best_s):
                return
            yield candidate


def shrink_job(profile: Profile) -> Profile:
    """The profile of a half, a quarter, ... of a job's nodes and batch if the batch exceeds ``MANY`` samples.

    The part keeps ``PART`` ranks, and states have room where they have room on all ranks. A job with requested CP or DP
    has no parts.
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
