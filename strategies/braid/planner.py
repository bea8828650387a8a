"""The layout: groups of several widths by believed programs; pipelines by their busiest rank, the best on trial.

In a pipeline the LLM is on all blocks of a replica, every other module in copies over runs of the same blocks.
"Encoder" includes generators.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Annotated, ClassVar, NamedTuple

import numpy as np

from entrain_bench.balancing.candidates import Candidate, Draft, by_estimate, rising_candidates
from entrain_bench.balancing.chunk_estimates import packed_units_s
from entrain_bench.balancing.fixed_jobs import default_job
from entrain_bench.balancing.interface import MakeProgram
from entrain_bench.balancing.planning import partition_layers, recompute_choices, stage_sums
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.rounds import layouts_with_widths, splits
from entrain_bench.balancing.tuning import Candidates, tuned
from entrain_bench.base.arithmetic import decisive, matmul
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.base.errors import UserError
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.specs.job import Degrees, Job, divisors
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.parse import Allowed, Count, Rate, at_least
from entrain_bench.specs.shapes import SampleShapes

from .assigner import chunk_layers_s, chunk_tokens, level_shares, others, unit_layers_s
from .packs import fastest_packs

# Shapes are considered whose rating is at most so many times the best of a job with fixed degrees, and of jobs before.
WORST = 1.3
HOPELESS = 2.0
# Layouts with widths are compared on so many drawn batches: on more if those have fewer samples than the first number,
# on fewer if they have more than the second. A layout is dropped if it takes so many times as long as the best.
BATCHES = 3
FEW = 512
MANY = 6144
NEAR = 1.05
# No pipelines are planned if the best layout with widths takes at most so many times its work evenly shared.
PIPELINED = 1.5
# Ranks up to which pipelines have the whole budget of simulated batches; it shrinks with more, down to the second.
RANKS = 64
FEWEST = 12


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

    @property
    def copies_abreast(self) -> int:
        """Copies of an encoder on one run of blocks."""
        return max(1, self.degrees.tp * self.degrees.cp // (self.encoder_tp * self.encoder_cp))

    @property
    def blocks_abreast(self) -> int:
        """Blocks that a stage of an encoder takes."""
        return max(1, self.encoder_tp * self.encoder_cp // (self.degrees.tp * self.degrees.cp))

    def tp_and_cp(self, module: ModuleSpec) -> tuple[int, int]:
        """TP and CP of a module."""
        return (self.encoder_tp, self.encoder_cp) if module.per_item else (self.degrees.tp, self.degrees.cp)

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
    modules = others(job.model).values()
    if all(splits(module, degrees.tp) for module in modules):
        yield degrees.tp, degrees.cp
    if not planner.encoder_degrees or not modules:
        return
    inside = [(tp, cp) for tp in reversed(divisors(degrees.tp)) for cp in divisors(degrees.tp * degrees.cp // tp)]
    for blocks in planner.spans:
        if degrees.pp % blocks == 0:
            inside += [(degrees.tp, degrees.cp * blocks), (degrees.tp * blocks, degrees.cp)]
    for tp, cp in inside:
        whole = cp == 1 or all(job.framework.sequence_parts(module, cp) == cp for module in modules)
        fits = job.cluster.gpus_per_node % tp == 0 and all(splits(module, tp) for module in modules)
        if whole and fits and (tp, cp) != (degrees.tp, degrees.cp):
            yield tp, cp


class ModuleWork(NamedTuple):
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
    _known: dict[tuple[int, int, int, bool], ModuleWork] = field(init=False, default_factory=dict)

    def _of(self, shape: Shape, index: int) -> ModuleWork:
        module = self.profile.job.model.modules[index]
        tp, cp = shape.tp_and_cp(module)
        again = shape.recompute[index]
        key = index, tp, cp, again
        if key not in self._known:
            units = module.units(self.samples)
            kinds = module.layer_kind
            units_s = unit_layers_s(self.profile, module, self.samples, tp, cp, again)
            longest = np.zeros(len(self.samples))
            whole_s = matmul(units_s, np.bincount(kinds, minlength=len(module.kinds)))
            np.maximum.at(longest, module.owners(self.samples, units), whole_s)
            scale = self.profile.job.global_batch / len(self.samples)
            num_chunks = 0
            if module.per_item:
                lengths = module.lengths(self.samples, units)
                num_chunks = round(float(lengths.sum()) * scale / chunk_tokens(self.profile, module, lengths, tp, cp))
            chunk_s = chunk_layers_s(self.profile, module, tp, cp, again)
            self._known[key] = ModuleWork((units_s.sum(axis=0) * scale)[kinds], chunk_s[kinds], num_chunks, longest)
        return self._known[key]

    def layers_s(self, shape: Shape, index: int) -> FloatArray:
        """Seconds of each layer of a module in an iteration of one LLM replica, on one of its blocks ``[layers]``."""
        work = self._of(shape, index)
        chunks = max(work.num_chunks, shape.num_microbatches * shape.degrees.dp)
        return np.asarray((work.units_s + chunks * work.chunk_s) / shape.degrees.dp)

    def longest_s(self, shape: Shape) -> float:
        """Seconds of the sample that takes longest, forth and back: its longest items, before the LLM and after it."""
        model = self.profile.job.model
        before, behind = np.zeros((2, len(self.samples)))
        for index in others(model):
            longest = before if index < model.llm_index else behind
            np.maximum(longest, self._of(shape, index).longest_s, out=longest)
        return float((before + self._of(shape, model.llm_index).longest_s + behind).max())

    def least_s(self, shape: Shape) -> float:
        """No split makes an iteration of a shape shorter: all work, evenly on all blocks; and the longest sample."""
        lanes = shape.degrees.pp
        total = self.layers_s(shape, self.profile.job.model.llm_index).sum() / lanes
        for index in others(self.profile.job.model):
            total += self.layers_s(shape, index).sum() / (shape.copies_abreast * lanes // shape.blocks_abreast)
        return max(float(total), self.longest_s(shape))


def split_layers(work: ShapeWork, shape: Shape) -> tuple[list[tuple[int, ...]], float]:
    """Layers of all stages, split evenly, and the busiest rank's believed seconds if copies share the work out."""
    model = work.profile.job.model
    layer_s = work.layers_s(shape, model.llm_index)
    layers = {model.llm_index: partition_layers(layer_s, shape.llm_stages)}
    busy_s = np.zeros(shape.degrees.pp)
    busy_s[shape.llm_blocks] = stage_sums(layer_s, layers[model.llm_index])
    abreast = shape.copies_abreast
    for index in others(model):
        layer_s = work.layers_s(shape, index)
        layers[index] = partition_layers(layer_s, shape.encoder_stages)
        cost_s = stage_sums(layer_s, layers[index])
        lanes_s = busy_s.reshape(shape.segments, shape.encoder_stages, shape.blocks_abreast)
        base_s = np.repeat(lanes_s.max(axis=2), abreast, axis=0)
        shares = level_shares(base_s[None], cost_s[None]).reshape(shape.segments, abreast)
        lanes_s += (shares.sum(axis=1)[:, None] / abreast * cost_s)[:, :, None]
    return [layers[index] for index in range(len(model.modules))], float(busy_s.max())


def place(job: Job, shape: Shape, layers: Sequence[tuple[int, ...]]) -> Layout:
    """The layout of a shape; replicas are consecutive ranks, blocks of TP x CP ranks inside."""
    degrees = shape.degrees
    width = shape.encoder_tp * shape.encoder_cp
    ranks = np.arange(degrees.dp * degrees.pp * degrees.tp * degrees.cp)
    blocks = ranks.reshape(degrees.dp, degrees.pp, degrees.tp * degrees.cp)
    runs = ranks.reshape(degrees.dp, shape.segments, shape.encoder_stages, shape.copies_abreast, width)
    copies = runs.transpose(0, 1, 3, 2, 4).reshape(-1, shape.encoder_stages, width)
    modules = []
    for module, split, again in zip(job.model.modules, layers, shape.recompute, strict=True):
        held = copies[:, : len(split)] if module.per_item else blocks[:, shape.llm_blocks]
        modules.append(ModuleLayout(module.name, *shape.tp_and_cp(module), split, np.ascontiguousarray(held), again))
    return Layout(tuple(modules), shape.num_microbatches)


def llm_places(job: Job, degrees: Degrees, spread: bool) -> list[tuple[int, int]]:
    """Numbers of the LLM's stages, and blocks from one to the next; if ``spread`` also on a half, a quarter, ...."""
    layers = len(job.model.llm.layers)
    lanes = degrees.pp
    choices = [(min(lanes, layers), 1)]
    for count in reversed(divisors(lanes)[:-1]) if spread and others(job.model) else ():
        if count <= layers:
            choices += [(count, 1), (count, lanes // count)]
    return [*dict.fromkeys(choices)]


def list_shapes(job: Job, choices: Sequence[tuple[bool, ...]], planner: BraidPlanner) -> Iterator[Shape]:
    """Every shape of a job's degrees, of some choices of recomputation, and of multiples of its microbatches."""
    model = job.model
    fewest = min((len(module.layers) for module in others(model).values()), default=0)
    for degrees in job.degrees():
        if not splits(model.llm, degrees.tp) or (not fewest and len(model.llm.layers) < degrees.pp):
            continue
        # A replica has a sample for each microbatch.
        most = job.global_batch // degrees.dp
        plain = job.num_microbatches(degrees.dp)
        counts = sorted({min(most, max(1, round(plain * factor))) for factor in planner.microbatches})
        for (tp, cp), again in product(encoder_degrees(job, degrees, planner), choices):
            stages = degrees.pp * degrees.tp * degrees.cp // max(tp * cp, degrees.tp * degrees.cp)
            runs = divisors(stages) if planner.encoder_copies and fewest else [1]
            runs = [run for run in runs if not fewest or stages // run <= fewest]
            for segments, place, count in product(runs, llm_places(job, degrees, planner.llm_stages), counts):
                yield Shape(degrees, tp, cp, segments, *place, again, count)


@dataclass(frozen=True, slots=True)
class BraidPlanner:
    """Encoders and LLM on all ranks of a replica.

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

        Pipelines compete only if groups of several widths, where the job allows them, leave ranks idle for long.
        """
        profile = profile.smoothed()
        wide, even_s = self._with_widths(profile)
        if wide and decisive(wide[0].estimated_s) <= decisive(PIPELINED * even_s):
            return wide[0].layout
        job = profile.job
        default = default_job(job)
        work = ShapeWork(profile, profile.samples.draw(self.profile_samples))
        best_s = np.inf

        def pipelines(cut: float, sized: Profile) -> Iterator[Candidate]:
            nonlocal best_s
            # Where sizes are free, another job has them; the default job is answered as if it were given.
            request = replace(sized.job.request, recompute=job.request.recompute)
            is_other = job.free_microbatch_size and replace(sized.job, request=request) != default
            planner = replace(self, microbatches=(1,)) if is_other else self
            for candidate in planner.rated(sized, work, make_program.chooses_recomputation, cut * best_s):
                if candidate.estimated_s < best_s and has_room(profile, candidate.layout):
                    best_s = candidate.estimated_s
                yield candidate

        budget = self.num_trials if profile.tuning_budget is None else profile.tuning_budget
        budget = max(min(budget, FEWEST), budget * RANKS // max(RANKS, job.cluster.num_ranks))
        widths: list[Candidates] = [lambda _: wide] if wide else []
        try:
            return tuned(profile, [partial(pipelines, HOPELESS), *widths], make_program, budget)
        except UserError:
            # The best may not fit memory; what does may be far from them.
            return tuned(profile, [partial(pipelines, np.inf), *widths], make_program, budget)

    def _with_widths(self, profile: Profile) -> tuple[list[Candidate], float]:
        """Layouts whose groups have several widths, by rising estimate, and seconds of their work evenly shared.

        An estimate is the mean over drawn batches; only layouts near the best have more than a few.
        """
        start = profile.samples.state
        offers = list[Candidate]()
        size = profile.job.global_batch
        count = min(max(BATCHES, FEW // size), max(1, MANY // size)) if self.widths else 0
        batches = [profile.samples.draw(size) for _ in range(count)]
        profile.samples.restore(start)
        best = np.full(count, np.inf)
        for layout in layouts_with_widths(profile.job) if count else ():
            # No round is shorter than its gathers.
            if not has_room(profile, layout) or gathers_s(profile, layout) > NEAR * best.mean():
                continue
            seconds = np.zeros(0)
            for samples in batches:
                seconds = np.append(seconds, fastest_packs(samples, layout, profile)[0])
                is_near = seconds.mean() <= NEAR * best[: len(seconds)].mean()
                if np.isinf(seconds[-1]) or (len(seconds) * size >= FEW and not is_near):
                    break
            else:
                offers.append(Candidate(float(seconds.mean()), layout))
                best = min(best, seconds, key=np.mean)
        return by_estimate(offers), min((evenly_s(samples, profile) for samples in batches), default=np.inf)

    def rated(
        self, profile: Profile, work: ShapeWork, recompute_later: bool, most_s: float = np.inf
    ) -> Iterator[Candidate]:
        """Layouts that could be among the best, by the seconds of their busiest rank, or longest sample, and step."""
        job = profile.job

        def placed(shape: Shape, layers: Sequence[tuple[int, ...]], passes_s: float) -> Candidate:
            layout = place(job, shape, layers)
            return Candidate(passes_s + profile.programs.step_s(layout), layout)

        def divided(shape: Shape) -> Draft:
            layers, busiest_s = split_layers(work, shape)
            passes_s = max(busiest_s, work.longest_s(shape))
            return Draft(passes_s, partial(placed, shape, layers, passes_s))

        shapes = list_shapes(job, recompute_choices(job, chosen_later=recompute_later), self)
        drafts = (Draft(work.least_s(shape), partial(divided, shape)) for shape in shapes)
        best_s = np.inf
        for candidate in rising_candidates(drafts, most_s):
            best_s = min(best_s, candidate.estimated_s)
            if decisive(candidate.estimated_s) > decisive(WORST * best_s):
                return
            yield candidate


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
