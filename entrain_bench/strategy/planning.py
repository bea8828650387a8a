"""Building blocks of planners: shares of ranks, stages of layers, placement on ranks, and fitting memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, merge
from itertools import chain, islice, pairwise, product

import numpy as np

from entrain_bench.arithmetic import decisive
from entrain_bench.arrays import FloatArray, IntArray
from entrain_bench.errors import IncompatibleError, OutOfMemoryError, UserError
from entrain_bench.program.layout import Layout, ModuleLayout, check_layout
from entrain_bench.specs.job import Degrees, Job
from entrain_bench.specs.model import ModelSpec, Role
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.strategy.interface import MakeProgram
from entrain_bench.strategy.profile import Profile

# Batches profiled to check memory; fewer if they are so large that samples abound.
MEMORY_BATCHES = 16
MEMORY_SAMPLES = 65_536


def proportional_allocation(total: int, shares: FloatArray, most: Sequence[int] | None = None) -> tuple[int, ...]:
    """Split ``total`` stages in proportion to shares, at least one and at most ``most`` each (no limit if None).

    The nearest feasible integers in the least-squares sense (arXiv:2605.27918, Algorithm 1): start from one each, then
    give every further one to the share furthest below its due. Shares that sum to zero count as equal.

    Raises:
        UserError: if the total is below one each or above ``most`` together.
    """
    most = [total] * len(shares) if most is None else most
    if not len(shares) <= total <= sum(most):
        raise UserError(f"layout: {total} stages cannot be split among {len(shares)} modules of {[*most]} layers")
    shares = np.asarray(shares, np.float64)
    even = np.full(len(shares), 1 / len(shares))
    due = decisive((shares / shares.sum() if shares.sum() > 0 else even) * total)
    given = np.ones(len(due))
    for _ in range(total - len(due)):
        given[np.argmax(np.where(given < most, due - given, -np.inf))] += 1
    return tuple(int(count) for count in given)


def allocate_stages(profile: Profile, samples: SampleShapes, degrees: Degrees) -> tuple[int, ...]:
    """Pipeline stages of the merged encoder and of the LLM by their share of the estimated workload.

    The stages of a chain have TP x CP in common, so stages are what is shared out.
    """
    if not profile.job.model.encoders:
        return (degrees.pp,)
    encoder, llm = profile.estimate_samples(samples, degrees.tp, degrees.cp)
    model = profile.job.model
    most = [min(len(module.layers) for module in model.encoders), len(model.llm.layers)]
    # Forwards are estimated; what is frozen has less of a backward.
    encoder_share = float(np.mean([module.work_share for module in model.encoders]))
    shares = np.array([encoder.sum() * encoder_share, llm.sum() * model.llm.work_share])
    return proportional_allocation(degrees.pp, shares, most)


def stable_samples(profile: Profile, degrees: Degrees, num_validations: int, max_samples: int) -> tuple[int, bool]:
    """The least power of two at which fresh batches all repeat the allocation of a first one.

    arXiv:2605.27918, Algorithm 1, started at one sample.

    Returns:
        The number of samples, at most ``max_samples``, and whether all ``num_validations`` batches of it agreed.
    """
    num_samples = 1
    while True:
        first = allocate_stages(profile, profile.draw(num_samples), degrees)
        if all(allocate_stages(profile, profile.draw(num_samples), degrees) == first for _ in range(num_validations)):
            return num_samples, True
        if 2 * num_samples > max_samples:
            return num_samples, False
        num_samples *= 2


def partition_layers(layer_s: FloatArray, num_stages: int) -> tuple[int, ...]:
    """Consecutive layers a stage so that the slowest stage is fastest (arXiv:2605.27918, Algorithm 2, tier 1).

    ``F(l, p) = min over l' < l of max(F(l', p - 1), sum of layers l'+1..l)``; O(layers^2 x stages).

    Args:
        layer_s: time of each layer for one microbatch ``[layers]``.
        num_stages: stages, at most the number of layers.
    """
    num_layers = len(layer_s)
    if num_stages > num_layers:
        raise UserError(f"layout: {num_layers} layers cannot fill {num_stages} stages")
    cuts = [cut for _, cut in islice(_partitions(layer_s), 1, num_stages)]
    bounds = [num_layers]
    for cut in reversed(cuts):
        bounds.append(int(cut[bounds[-1]]))
    bounds = [*reversed(bounds)]
    return tuple(np.diff([0, *bounds]).tolist())


def spread_blocks(num_layers: int, num_stages: int) -> tuple[int, ...] | None:
    """As many blocks on every stage, the embedding with the first and the head with the last, as Megatron-LM does.

    None if the blocks cannot be spread evenly.
    """
    blocks, rest = divmod(num_layers - 2, num_stages)
    if rest or not blocks:
        return None
    layers = np.full(num_stages, blocks)
    layers[0] += 1
    layers[-1] += 1
    return tuple(layers.tolist())


def slowest_stages_s(layer_s: FloatArray) -> FloatArray:
    """Slowest stage of the best partition into 1, 2, ... stages, as many as there are layers ``[layers]``."""
    return np.array([best[-1] for best, _ in _partitions(layer_s)])


def _partitions(layer_s: FloatArray) -> Iterator[tuple[FloatArray, IntArray]]:
    """For 1, 2, ... stages: F, the slowest stage over the first l layers, and the l' it cuts at ``[layers + 1]``."""
    num_layers = len(layer_s)
    prefix = np.concatenate(([0.0], np.cumsum(layer_s)))
    best = decisive(prefix)
    best[0] = np.inf
    # Equal layers in another order are as slow: the earliest cut is taken, not the one that rounding favours.
    span = decisive(prefix[None, :] - prefix[:, None])  # [l', l]
    later = np.arange(num_layers + 1)[:, None] < np.arange(num_layers + 1)[None, :]
    cut = np.zeros(num_layers + 1, np.int64)
    for _ in range(num_layers):
        yield best, cut
        slowest = np.where(later, np.maximum(best[:, None], span), np.inf)
        cut = slowest.argmin(axis=0)
        best = slowest.min(axis=0)


def stage_sums(layer_s: FloatArray, layers_per_stage: Sequence[int]) -> FloatArray:
    """Sum of a per-layer quantity over each stage ``[stages]``."""
    return np.add.reduceat(layer_s, np.cumsum([0, *layers_per_stage[:-1]]))


def place_chain(
    job: Job,
    degrees: Degrees,
    layers: Sequence[tuple[int, ...]],
    recompute: Sequence[bool],
    leading: bool,
    virtual_stages: int = 1,
) -> Layout:
    """A homogeneous replica: LLM stages in a chain; encoders before them and generators behind, or on the outer ones.

    Ranks of a replica are consecutive, TP innermost, then CP, then stages; replicas follow each other. Several encoders
    share the encoder stages, several generators the generator stages.

    Args:
        job: the job.
        degrees: TP, CP, DP and the number of stages of a replica.
        layers: layers of each stage, for every module of the model.
        recompute: modules that recompute their activations.
        leading: whether encoders have leading stages of their own, and generators trailing ones.
        virtual_stages: stages that each rank of the pipeline holds in turn; ``degrees.pp`` counts the ranks.
    """
    width = degrees.tp * degrees.cp
    ranks = np.arange(degrees.dp * degrees.pp * width).reshape(degrees.dp, degrees.pp, width)
    modules = []
    firsts = chain_starts(job.model, degrees.pp * virtual_stages, layers, leading)
    for module, first, split, again in zip(job.model.modules, firsts, layers, recompute, strict=True):
        held = np.ascontiguousarray(ranks[:, (first + np.arange(len(split))) % degrees.pp])
        modules.append(ModuleLayout(module.name, degrees.tp, degrees.cp, split, held, again))
    layout = Layout(tuple(modules), job.num_microbatches(degrees.dp))
    check_layout(layout, job.model, job.cluster)
    return layout


def chain_starts(model: ModelSpec, pp: int, layers: Sequence[tuple[int, ...]], leading: bool) -> list[int]:
    """First stage of each module in a chain of ``pp`` stages; arguments as for ``place_chain``."""
    ahead = max((len(layers[index]) for index in range(model.llm_index)), default=0) if leading else 0
    first = {Role.ENCODER: 0, Role.LLM: ahead}
    return [first.get(module.role, pp - len(split)) for module, split in zip(model.modules, layers, strict=True)]


@dataclass(frozen=True, slots=True)
class Island:
    """The layout of a module before its ranks are chosen."""

    tp: int
    cp: int
    dp: int
    layers_per_stage: tuple[int, ...]
    recompute: bool = False


def place_islands(
    job: Job, islands: Sequence[Island], num_microbatches: int, single_rank_boundary: bool = False
) -> Layout:
    """Encoders, LLM and generators on disjoint ranks; several encoders share theirs, and so do several generators.

    Where all have one TP, CP and DP, replicas follow each other. Otherwise units do, a replica's stages next to each
    other, the widest tensor parallelism first, so that every block is aligned.

    Args:
        job: the job.
        islands: one for every module of the model, the same but for layers among those that share ranks.
        num_microbatches: LLM microbatches of a replica.
        single_rank_boundary: see ``Layout``.
    """
    units = [(islands[unit[0]], unit) for unit in job.model.module_groups]
    shapes = [(island.dp, len(island.layers_per_stage), island.tp * island.cp) for island, _ in units]
    if len({(island.tp, island.cp, island.dp) for island, _ in units}) == 1:
        dp, _, width = shapes[0]
        bounds = np.cumsum([0, *(pp for _, pp, _ in shapes)])
        chain = np.arange(dp * bounds[-1] * width).reshape(dp, -1, width)
        grids = [np.ascontiguousarray(chain[:, low:high]) for low, high in pairwise(bounds)]
    else:
        grids = [np.arange(int(np.prod(shape))).reshape(shape) for shape in shapes]
        start = 0
        for index in sorted(range(len(units)), key=lambda i: -units[i][0].tp):
            grids[index] = grids[index] + start
            start += grids[index].size
    modules = []
    for grid, (_, unit) in zip(grids, units, strict=True):
        for index in unit:
            island, name = islands[index], job.model.modules[index].name
            modules.append(ModuleLayout(name, island.tp, island.cp, island.layers_per_stage, grid, island.recompute))
    layout = Layout(tuple(modules), num_microbatches, single_rank_boundary)
    check_layout(layout, job.model, job.cluster)
    return layout


def recompute_choices(job: Job, groups: Sequence[Sequence[int]] | None = None) -> list[tuple[bool, ...]]:
    """Choices of groups whose activations are recomputed in backward: every one, or the one that is asked for.

    Args:
        job: the job.
        groups: modules that recompute together or not at all; each by itself if None.

    Raises:
        IncompatibleError: if some modules of a group are asked for, but not all.
    """
    groups = [(index,) for index in range(len(job.model.modules))] if groups is None else groups
    asked = job.request.recompute
    if asked is None:
        return list(product([False, True], repeat=len(groups)))
    again = [[job.model.modules[index].name in asked for index in group] for group in groups]
    if any(len({*group}) > 1 for group in again):
        raise IncompatibleError(f"layout.recompute={[*asked]}: this planner recomputes modules on the same ranks alike")
    return [tuple(all(group) for group in again)]


def recompute_factor(recompute: bool) -> float:
    """Time of forward and backward relative to no recomputation: a backward takes about two forwards."""
    return 4 / 3 if recompute else 1.0


def check_memory(profile: Profile, layout: Layout, make_program: MakeProgram) -> None:
    """Check a layout by the memory of the programs it leads to on freshly profiled global batches.

    The executors charge the true need of every batch; ``Job.planning_budget_bytes`` leaves a margin for batches heavier
    than the profiled ones.

    Raises:
        OutOfMemoryError: saying where how much is missing.
    """
    job = profile.job
    memory = profile.memory
    draft: MakeProgram = getattr(make_program, "draft", make_program)
    limit = job.planning_budget_bytes
    states = memory.lane_state_bytes(layout)
    need, what = float(states.max()), "weights, gradients and optimizer states alone"
    num_batches = max(1, min(MEMORY_BATCHES, MEMORY_SAMPLES // job.global_batch))
    for _ in range(num_batches):
        if need > limit:
            break
        batch = profile.draw(job.global_batch)
        peak = memory.peak_bytes(draft(batch, layout))
        if draft is not make_program and peak.max() > limit:
            peak = memory.peak_bytes(make_program(batch, layout))
        if peak.max() > need:
            need, what = float(peak.max()), f"with {states[peak.argmax()] / 2**30:.1f} GiB of states"
        if need > limit:
            break
    if need > limit:
        described = "; ".join(f"{name} {text}" for name, text in layout.describe().items())
        raise OutOfMemoryError(
            f"layout {described}: a rank needs {need / 2**30:.1f} GiB ({what}), {(need - limit) / 2**30:.1f} GiB more "
            f"than planners may use of the budget of {job.memory_budget_bytes / 2**30:.1f} GiB"
        )


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout a planner considers.

    Attributes:
        estimated_s: the planner's estimate of the iteration time.
    """

    estimated_s: float
    layout: Layout


@dataclass(frozen=True, slots=True)
class Draft:
    """A candidate before it is placed on ranks, which takes long on many.

    Attributes:
        least_s: what its estimate cannot fall below.
        place: makes the candidate.
    """

    least_s: float
    place: Callable[[], Candidate]


def rising_candidates(drafts: Iterable[Draft]) -> Iterator[Candidate]:
    """The drafts' candidates by rising estimate, each placed only when no other can come before it."""
    queue: list[tuple[float, int, Draft | Candidate]] = [
        (decisive(draft.least_s), number, draft) for number, draft in enumerate(drafts)
    ]
    heapify(queue)
    while queue:
        _, number, entry = heappop(queue)
        if isinstance(entry, Candidate):
            yield entry
        else:
            candidate = entry.place()
            heappush(queue, (decisive(candidate.estimated_s), number, candidate))


def by_estimate(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The candidates by rising estimate; of those that count as equal (``decisive``) the earlier first."""
    return sorted(candidates, key=lambda c: decisive(c.estimated_s))


def fastest_in_trials(
    profile: Profile,
    candidates: Callable[[Profile], Iterable[Candidate]],
    make_program: MakeProgram,
    num_trials: int,
) -> Layout:
    """Of the best candidates that fit memory, the layout that runs one profiled batch fastest.

    Where the microbatch size is free, every size gets as many trials as another, for estimates that are linear in the
    samples do not tell sizes apart.

    Args:
        profile: samples and measurements.
        candidates: by rising estimate, for a profile whose job has a microbatch size.
        make_program: see ``Planner.plan``.
        num_trials: layouts tried, of all sizes together; one is the best estimate, taken without trial.

    Raises:
        UserError: why there is no candidate, or none fits.
    """
    if num_trials == 1:
        rising = merge(*_each_size(profile, candidates), key=lambda c: decisive(c.estimated_s))
        return next(_fitting(profile, rising, make_program)).layout
    batch = profile.draw(profile.job.global_batch)
    each_size = _each_size(profile, candidates)
    share = -(-num_trials // len(each_size))
    layouts: list[Layout] = []
    problem: UserError | None = None
    for some in each_size:
        try:
            layouts += [candidate.layout for candidate in islice(_fitting(profile, some, make_program), share)]
        except UserError as error:
            problem = problem or error
    if problem is not None and not layouts:
        raise problem
    return min(layouts, key=lambda layout: decisive(profile.trial_s(make_program(batch, layout))))


def _each_size(profile: Profile, candidates: Callable[[Profile], Iterable[Candidate]]) -> list[Iterator[Candidate]]:
    """The candidates of every microbatch size the job may have; raises the first size's reason if none has any."""
    found: list[Iterator[Candidate]] = []
    problem: UserError | None = None
    for each in profile.each_microbatch_size():
        rising = iter(candidates(each))
        try:
            found += [chain([first], rising) for first in islice(rising, 1)]
        except UserError as error:
            problem = problem or error
    if not found:
        name = profile.job.model.name
        raise problem or UserError(f"layout: model={name} has too few layers for the stages of a replica")
    return found


def _fitting(profile: Profile, candidates: Iterable[Candidate], make_program: MakeProgram) -> Iterator[Candidate]:
    """The candidates whose programs fit memory; raises the reason of the last one if there is none."""
    problem = UserError(f"layout: model={profile.job.model.name} has too few layers for the stages of a replica")
    fits = False
    for candidate in candidates:
        try:
            check_memory(profile, candidate.layout, make_program)
        except UserError as error:
            problem = error
        else:
            fits = True
            yield candidate
    if not fits:
        raise problem
