"""Groups of several widths on planes of ranks: their planner, layouts, labels of units, and programs.

A plane is a stage's ranks; a position in it is one TP group. A round of a plane is a microbatch: each position has at
most one pack, which its group shares by context parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from entrain_bench.balancing.candidates import Candidate, by_estimate
from entrain_bench.balancing.chunk_estimates import packed_iteration_s
from entrain_bench.balancing.interface import MakeProgram
from entrain_bench.balancing.lpt import longest_first_by_row
from entrain_bench.balancing.options import TrialOptions
from entrain_bench.balancing.planning import (
    average_layer_s,
    chain_starts,
    checked_layout,
    partition_layers,
    recompute_choices,
    recompute_factor,
    stage_sums,
)
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.schedules import backward_microbatch, chain_chunks, check_order, one_f_one_b
from entrain_bench.balancing.tuning import Candidates, candidate_key, chosen_layout
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.arrays import FloatArray, IntArray, offsets_from_counts
from entrain_bench.base.errors import IncompatibleError, UserError
from entrain_bench.program import Program, Slots, build_program
from entrain_bench.program.assignment import Assignment, ModuleAssignment
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.specs.job import Degrees, Job, LayoutRequest
from entrain_bench.specs.model import ModelSpec, ModuleSpec
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.specs.sharding import SHARDINGS, ZERO1, ZERO3


@dataclass(frozen=True, slots=True)
class Rounds:
    """Group and round of every sample."""

    number: IntArray  # round of each sample ``[samples]``
    first: IntArray  # first position of its group ``[samples]``
    width: IntArray  # positions of its group, a power of two that divides ``first`` ``[samples]``


type Layers = Sequence[tuple[int, ...]]
"""Layers of each stage, for every module of a model."""


def plane_layout(
    job: Job,
    tp: int,
    layers: Layers,
    leading: bool,
    recompute: Sequence[bool],
    num_rounds: int,
) -> Layout:
    """Return a layout of equally wide planes with groups of CP 1, 2, 4, ...; ``leading``: encoders come first."""
    llm = job.model.llm_index
    pp = len(layers[llm]) + (max(map(len, layers[:llm]), default=0) if leading else 0)
    firsts = chain_starts(job.model, pp, layers, leading)
    positions = job.cluster.num_ranks // (tp * pp)
    ranks = np.arange(positions * tp * pp).reshape(pp, positions, tp).swapaxes(0, 1)
    widths = tuple((tp, 2**power) for power in range(positions.bit_length()))
    modules = []
    for module, split, first, again in zip(job.model.modules, layers, firsts, recompute, strict=True):
        held = np.ascontiguousarray(ranks[:, first : first + len(split)])
        modules.append(ModuleLayout(module.name, tp, 1, split, held, again, widths=widths))
    return checked_layout(job, modules, num_rounds)


def even_layers(model: ModelSpec, layer_s: Sequence[FloatArray], pp: int) -> list[tuple[list[tuple[int, ...]], bool]]:
    """Return balanced layers of each module's stages, without and with leading encoder stages, and which it is."""
    llm = model.llm_index
    whole = [(len(seconds),) for seconds in layer_s]
    loaded = layer_s[llm].copy()
    loaded[-1] += sum(float(seconds.sum()) for seconds in layer_s[llm + 1 :])
    splits = []
    if pp <= len(loaded):
        loaded_first = loaded.copy()
        loaded_first[0] += sum(float(seconds.sum()) for seconds in layer_s[:llm])
        splits.append(([*whole[:llm], partition_layers(loaded_first, pp), *whole[llm + 1 :]], False))
    leading = []
    most = min((len(seconds) for seconds in layer_s[:llm]), default=0)
    for ahead in range(max(1, pp - len(loaded)), min(pp - 1, most) + 1):
        split = [partition_layers(seconds, ahead) for seconds in layer_s[:llm]]
        encoders_s = np.sum([stage_sums(*pair) for pair in zip(layer_s, split, strict=False)], axis=0)
        rest = partition_layers(loaded, pp - ahead)
        slowest_s = decisive(max(float(encoders_s.max()), float(stage_sums(loaded, rest).max())))
        leading.append((slowest_s, [*split, rest, *whole[llm + 1 :]]))
    if leading:
        splits.append((min(leading, key=lambda entry: entry[0])[1], True))
    return splits


def mean_tokens(profile: Profile, layout: Layout) -> int:
    """Return LLM tokens per position and round if a profiled batch takes the layout's number of rounds."""
    llm = layout.modules[profile.job.model.llm_index]
    tokens = int(profile.samples.tuning_batches(1, profile.job.global_batch)[0].llm_tokens.sum())
    return max(1, -(-tokens // (llm.dp * layout.num_microbatches)))


def round_labels(model: ModelSpec, shapes: SampleShapes, layout: Layout, rounds: Rounds, *, spread: bool) -> Assignment:
    """Return group and round of every unit, those of its sample; ``spread`` items go to its least-loaded position."""
    modules = []
    for module, placed in zip(model.modules, layout.modules, strict=True):
        units = module.units(shapes)
        owner = module.owners(shapes, units)
        first = rounds.first[owner]
        width = rounds.width[owner]
        number = rounds.number[owner]
        replica = group_numbers(placed, first, width)
        if spread and module is not model.llm:
            cost = module.forward_flops(module.lengths(shapes, units))
            for group_width in np.unique(width).tolist():
                mine = np.flatnonzero(width == group_width)
                _, pack = np.unique(np.stack([number[mine], first[mine]]), axis=1, return_inverse=True)
                replica[mine] = first[mine] + longest_first_by_row(cost[mine], pack.ravel(), group_width)
        modules.append(ModuleAssignment(replica, number))
    return Assignment(tuple(modules))


def check_plane(layout: Layout, who: str, planner: str) -> None:
    """Refuse layouts that ``plane_layout`` does not make; ``IncompatibleError`` names who needs it, and its planner."""
    for placed in layout.modules:
        positions = [(placed.tp, 2**power) for power in range(len(placed.widths))]
        if not placed.widths or [*placed.widths] != positions:
            degrees = " ".join(f"{tp}x{cp}" for tp, cp in placed.degrees)
            needed = f"groups of several widths with one TP ({planner})"
            raise IncompatibleError(f"layout: {who} needs {needed}. {placed.module} has {degrees}")


def group_numbers(placed: ModuleLayout, first: IntArray, width: IntArray) -> IntArray:
    """Return the number by which assignments name the group of ``width`` positions from ``first`` on ``[units]``."""
    degree = np.searchsorted([cp for _, cp in placed.degrees], width)
    return np.asarray(offsets_from_counts(placed.num_groups)[degree] + first // width)


def rounds_program(model: ModelSpec, shapes: SampleShapes, layout: Layout, assignment: Assignment) -> Program:
    """1F1B over the stages; rounds are microbatches. ``IncompatibleError`` if a sample comes before its items.

    In one stage all groups of a round run encoders forward, then the LLM, then generators, and then all of them back.
    """
    chunks = chain_chunks(model, shapes, layout, assignment, split_backward=False)
    check_order(model, shapes, assignment)
    freed = backward_microbatch(model, shapes, assignment, chunks)
    count = 1 + max(int(last.max(initial=-1)) for last in freed)
    last = max(int(placed.ranks.max()) for placed in layout.modules)
    slots = []
    for module, rows, back, placed in zip(model.modules, chunks, freed, layout.modules, strict=True):
        if layout.is_one_stage:
            depth = 0 if module.is_encoder else 1 if module is model.llm else 2
            slots.append(Slots(6 * rows.microbatch[:, None] + depth, 6 * back[:, None] + 5 - depth))
            continue
        # Stages have equally many ranks and follow each other.
        ahead = (last - placed.plane[:, 0]) // placed.plane.shape[1]
        forward, _ = one_f_one_b(rows.microbatch[:, None], np.array([[count]]), ahead)
        _, backward = one_f_one_b(back[:, None], np.array([[count]]), ahead)
        slots.append(Slots(forward, backward))
    return build_program(model, layout, shapes, chunks, slots)


# Kinds of sharding for planners whose own is ZeRO-3.
FULLY_SHARDED = (ZERO3, *(kind for kind in SHARDINGS if kind != ZERO3))
# Ranks of a group, and ways to split layers among them.
GROUPS = (1, 2, 4, 8, 16, 32)
TENSOR_PARALLEL = (1, 2, 4, 8)


def layouts_with_widths(job: Job) -> Iterator[Layout]:
    """Layouts of one stage on all ranks with groups of any width that the request allows; weights are whole."""
    if job.request.ep not in (None, 1):
        # Ranks that divide experts go through every pass together, and groups of other widths do not.
        return
    job = without_stages(job)
    num_ranks = job.cluster.num_ranks
    node = job.cluster.gpus_per_node
    asked = job.request.tp
    recomputed = [module.name in (job.request.recompute or ()) for module in job.model.modules]
    whole = [(len(module.layers),) for module in job.model.modules]
    for least in plane_degrees(job, TENSOR_PARALLEL):
        modules = []
        for module, again, split in zip(job.model.modules, recomputed, whole, strict=True):
            is_llm = module is job.model.llm
            base = least if is_llm else 1
            widths = [
                (tp, width // tp)
                for width in GROUPS
                for tp in ((asked,) if asked and is_llm else TENSOR_PARALLEL)
                if width <= num_ranks and width % tp == tp % base == node % tp == 0 and splits(module, tp)
            ]
            if not widths or widths[0][0] * widths[0][1] > least:
                break
            ranks = np.arange(num_ranks).reshape(-1, 1, base)
            modules.append(ModuleLayout(module.name, base, 1, split, ranks, again, widths=tuple(widths)))
        else:
            yield Layout(tuple(modules), 1)


def without_stages(job: Job) -> Job:
    """The job as layouts without stages take it: a requested CP and DP together are all positions, so PP is 1."""
    asked = job.request
    return replace(job, request=replace(asked, pp=asked.pp or 1)) if asked.cp and asked.dp else job


def is_plane_fixed(request: LayoutRequest) -> bool:
    """Whether a request states all positions (TP groups) of one stage: as many as its DP x CP."""
    return bool(request.cp and request.dp and request.pp == 1)


def plane_degrees(job: Job, degrees: Sequence[int]) -> list[int]:
    """TP of the layouts of one stage that a request allows, of some; CP x DP are the positions, or divide them."""
    asked = job.request
    num_ranks = job.cluster.num_ranks
    copies = (asked.dp or 1) * (asked.cp or 1)
    if asked.pp not in (None, 1):
        return []
    tps = [asked.tp] if asked.tp else degrees
    fitting = [tp for tp in tps if job.cluster.gpus_per_node % tp == num_ranks % (tp * copies) == 0]
    return [tp for tp in fitting if num_ranks == tp * copies or not is_plane_fixed(asked)]


def splits(module: ModuleSpec, tp: int) -> bool:
    """Whether a tensor-parallel degree splits a module."""
    return module.splits_into(tp)


def group_widths(layout: Layout) -> IntArray:
    """Ranks of the groups that packs may have, narrow to wide: those that every module can fill."""
    module_widths = [{tp * cp for tp, cp in placed.degrees} for placed in layout.modules]
    narrowest = max(min(widths) for widths in module_widths)
    return np.array(sorted(width for width in set().union(*module_widths) if width >= narrowest))


@dataclass(frozen=True, slots=True)
class PlanePlanner(TrialOptions):
    """Plans TP and PP as in a static layout, DP x CP as one plane of groups, and one round per static microbatch.

    Attributes:
        sharded: whether weights are sharded over all ranks, in one stage, unless the job asks for other sharding.
        rounds: whether the number of rounds is the layout's; otherwise the assigner of sharded weights chooses it.
    """

    handles_generators: ClassVar[bool] = True

    sharded: bool = False
    rounds: bool = True

    @property
    def shardings(self) -> tuple[str, ...]:
        """Every kind, its own first."""
        return FULLY_SHARDED if self.sharded else SHARDINGS

    def plan(self, profile: Profile, make_program: MakeProgram) -> Layout:
        """Return the fastest of the most promising candidates that fit memory; ``UserError`` says why there is none."""
        if self.sharded:
            profile = profile.for_job(sharded_job(profile.job))
        return chosen_layout(profile, self.candidates(profile, make_program), make_program, self.num_trials)

    def candidates(self, profile: Profile, make_program: MakeProgram) -> Candidates:
        """Return candidates of every TP, PP, number of rounds and recomputation, by rising estimate."""
        samples = profile.samples.draw(self.profile_samples)
        batch = profile.samples.draw(profile.job.global_batch)
        known = PlaneEstimates(samples, batch, make_program.draft)
        later = make_program.chooses_recomputation
        return lambda sized: by_estimate(self._offered(sized, known, chosen_later=later))

    def _offered(self, profile: Profile, known: PlaneEstimates, *, chosen_later: bool) -> Iterator[Candidate]:
        job = profile.job
        problems = []
        is_any = False
        for tp, pp, rounds in dict.fromkeys(self._planes(job)):
            for layers, leading in even_layers(job.model, known.layers(profile, tp), pp):
                for recompute in recompute_choices(job, chosen_later=chosen_later):
                    try:
                        layout = plane_layout(job, tp, layers, leading, recompute, rounds)
                        candidate = known.estimated(profile, layout, own_rounds=self.rounds)
                    except UserError as error:
                        problems.append(error.with_traceback(None))
                    else:
                        is_any = True
                        yield candidate
        if problems and not is_any:
            raise problems[0]

    def _planes(self, job: Job) -> Iterator[tuple[int, int, int]]:
        """Yield TP, PP and rounds of the static layouts that a request allows."""
        if not self.sharded:
            yield from ((degrees.tp, degrees.pp, job.num_microbatches(degrees.dp)) for degrees in job.degrees())
        elif self.rounds:
            for degrees in sharded_degrees(job):
                yield degrees.tp, 1, job.global_batch // (degrees.dp * samples_at_once(job, degrees.dp))
        else:
            free = replace(job, request=replace(job.request, cp=None, pp=1, dp=None), microbatch_size=1)
            yield from ((tp, 1, 1) for tp in plane_degrees(job, sorted({degrees.tp for degrees in free.degrees()})))


@dataclass(frozen=True, slots=True)
class PlaneEstimates:
    """Layer times and estimates that were computed for earlier layouts."""

    samples: SampleShapes  # averaged into one shape
    batch: SampleShapes  # batch for estimates of programs
    make_program: MakeProgram  # the strategy's programs
    _layer_s: dict[int, list[FloatArray]] = field(default_factory=dict)
    _estimates: dict[tuple[object, ...], tuple[float, int]] = field(default_factory=dict)

    def layers(self, profile: Profile, tp: int) -> list[FloatArray]:
        """Return seconds of every layer of each module for an average sample at a TP."""
        if tp not in self._layer_s:
            one = profile.for_job(profile.job.with_microbatch_size(1))
            self._layer_s[tp] = average_layer_s(one, self.samples, tp, 1)
        return self._layer_s[tp]

    def estimated(self, profile: Profile, layout: Layout, *, own_rounds: bool) -> Candidate:
        """Return the layout with the estimated seconds of the batch's program; ``UserError`` if there is none."""
        again = [placed.recompute for placed in layout.modules]
        if any(again) and not layout.modules[0].scatters:
            plain = replace(layout, modules=tuple(replace(placed, recompute=False) for placed in layout.modules))
            module_s = np.array([float(layer_s.sum()) for layer_s in self.layers(profile, layout.modules[0].tp)])
            slower = float((module_s * [recompute_factor(recompute) for recompute in again]).sum() / module_s.sum())
            return Candidate(self.estimated(profile, plain, own_rounds=own_rounds).estimated_s * slower, layout)
        key = candidate_key(layout)
        if key not in self._estimates:
            program = self.make_program(self.batch, layout)
            rounds = 1 + int(program.chunks[program.model.llm_index].microbatch.max())
            self._estimates[key] = packed_iteration_s(program, profile), rounds
        seconds, rounds = self._estimates[key]
        return Candidate(seconds, layout if own_rounds else replace(layout, num_microbatches=rounds))


def sharded_job(job: Job) -> Job:
    """The job ``without_stages``, its weights sharded unless it asks for other sharding.

    ``IncompatibleError`` if it asks for stages, or for optimizer states of some ranks.
    """
    asked = job.request
    kind = asked.sharding or ZERO3
    if asked.pp not in (None, 1):
        raise IncompatibleError(f"layout.pp={asked.pp}: must be 1 or null with sharded weights")
    if job.framework.encoder_optimizers > 1 and kind != ZERO1:
        instances = job.framework.encoder_optimizers
        raise IncompatibleError(f"encoder_optimizers={instances}: must be 1 with sharded weights")
    job = without_stages(job)
    job = replace(job, request=replace(job.request, sharding=kind))
    if is_plane_fixed(asked := job.request) and not plane_degrees(job, TENSOR_PARALLEL):
        tps = [asked.tp] if asked.tp else [tp for tp in TENSOR_PARALLEL if job.cluster.gpus_per_node % tp == 0]
        allowed = " or ".join(str(job.cluster.num_ranks // (tp * (asked.cp or 1))) for tp in tps)
        why = f"with layout.cp={asked.cp} and sharded weights, which have no stages"
        raise IncompatibleError(f"layout.dp={asked.dp}: must be null or {allowed} {why}")
    return job


def sharded_degrees(job: Job) -> list[Degrees]:
    """Every (TP, CP, DP) of one stage on all ranks, DP a multiple of the requested one; ``UserError`` if none."""
    asked = job.request
    job.check_request()
    dp = asked.dp if is_plane_fixed(asked) else None
    free = replace(job, request=replace(asked, pp=1, dp=dp), microbatch_size=1)
    fitting = [
        degrees
        for degrees in free.degrees()
        if degrees.dp % (asked.dp or 1) == 0
        and (job.global_batch // degrees.dp) % samples_at_once(job, degrees.dp) == 0
    ]
    if not fitting:
        raise UserError(
            f"layout.dp={asked.dp} microbatch_size={job.microbatch_size}: no layout fits. With sharded weights DP is "
            f"{job.cluster.num_ranks} / (TP x CP); it must be a multiple of layout.dp, and microbatch_size must divide "
            f"global_batch={job.global_batch} / DP"
        )
    return fitting


def samples_at_once(job: Job, dp: int) -> int:
    """Return samples per microbatch of a replica: the job's size, or all samples of the replica if it has fewer."""
    return min(job.microbatch_size, job.global_batch // dp)
