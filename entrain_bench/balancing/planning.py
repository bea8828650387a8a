"""Building blocks of planners: shares of ranks, stages of layers, placement on ranks, and layouts of a file."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from typing import Any, ClassVar

import numpy as np

from entrain_bench.balancing.experts import with_experts
from entrain_bench.balancing.interface import MakeProgram
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.shardings import sharded_as
from entrain_bench.base.arithmetic import decisive
from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.base.errors import IncompatibleError, UserError
from entrain_bench.program.assignment import ModuleAssignment, pad_samples
from entrain_bench.program.layout import Layout, ModuleLayout, check_layout
from entrain_bench.program.plan_file import plan_fingerprint, read_plan
from entrain_bench.specs.job import Degrees, Job, LayoutRequest, divisors
from entrain_bench.specs.model import ModelSpec, ModuleSpec
from entrain_bench.specs.module_layers import Role
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.specs.sharding import SHARDINGS, ZERO1


def proportional_allocation(
    total: int, shares: FloatArray, most: Sequence[int] | None = None, least: int = 1, what: str = "stages"
) -> tuple[int, ...]:
    """Split ``total`` in proportion to shares within limits, which ``UserError`` names (arXiv:2605.27918)."""
    most = [total] * len(shares) if most is None else most
    if not least * len(shares) <= total <= sum(most):
        limits = " and ".join(f"{least} to {limit}" for limit in most)
        raise UserError(f"layout: cannot split {total} {what} among modules that take {limits}. Change layout.pp")
    shares = np.asarray(shares, np.float64)
    even = np.full(len(shares), 1 / len(shares))
    due = decisive((shares / shares.sum() if shares.sum() > 0 else even) * total)
    given = np.full(len(due), least)
    for _ in range(total - least * len(due)):
        given[np.argmax(np.where(given < most, due - given, -np.inf))] += 1
    return tuple(given.tolist())


def allocate_gpus(profile: Profile, samples: SampleShapes, degrees: Degrees) -> tuple[int, ...]:
    """Return a replica's GPUs for merged encoder and LLM by estimated work (arXiv:2605.27918, Algorithm 1's M_ref)."""
    width = degrees.tp * degrees.cp
    if not profile.job.model.encoders:
        return (degrees.pp * width,)
    encoder, llm = profile.estimates.samples(samples, degrees.tp, degrees.cp)
    model = profile.job.model
    most = [width * min(len(module.layers) for module in model.encoders), width * len(model.llm.layers)]
    # Only forwards are estimated; frozen layers have a shorter backward.
    encoder_share = float(np.mean([module.work_share for module in model.encoders]))
    shares = np.array([encoder.sum() * encoder_share, llm.sum() * model.llm.work_share])
    return proportional_allocation(degrees.pp * width, shares, most, width, "GPUs")


def gpus_to_stages(gpus: tuple[int, ...], width: int) -> tuple[int, ...]:
    """Convert GPUs to stages of ``width`` GPUs; the encoder's are rounded down (arXiv:2605.27918, section 4.2)."""
    encoders = tuple(count // width for count in gpus[:-1])
    return (*encoders, sum(gpus) // width - sum(encoders))


def allocate_stages(profile: Profile, samples: SampleShapes, degrees: Degrees) -> tuple[int, ...]:
    """Return the pipeline stages of the merged encoder and of the LLM, by their share of estimated work."""
    return gpus_to_stages(allocate_gpus(profile, samples, degrees), degrees.tp * degrees.cp)


def stable_samples(profile: Profile, degrees: Degrees, num_validations: int, max_samples: int) -> tuple[int, bool]:
    """Find the least power of two of samples whose batches have one GPU allocation; whether they do (Algorithm 1)."""
    num_samples = 1
    while True:
        draws = (profile.samples.draw(num_samples) for _ in range(1 + num_validations))
        gpus = (allocate_gpus(profile, samples, degrees) for samples in draws)
        first = next(gpus)
        agreed = all(count == first for count in gpus)
        if agreed or 2 * num_samples > max_samples:
            return num_samples, agreed
        num_samples *= 2


def partition_layers(layer_s: FloatArray, num_stages: int) -> tuple[int, ...]:
    """Return consecutive layers per stage that minimize the slowest (arXiv:2605.27918, Algorithm 2, tier 1)."""
    num_layers = len(layer_s)
    if num_stages > num_layers:
        raise UserError(f"layout: {num_layers} layers cannot fill {num_stages} stages; each needs at least 1 layer")
    layers = np.asarray(layer_s, np.float64).tobytes()
    bounds = [num_layers]
    for stages in range(num_stages, 1, -1):
        bounds.append(int(_best_cuts(layers, stages)[1][bounds[-1]]))
    return tuple(np.diff([0, *reversed(bounds)]).tolist())


def partitions(layer_s: FloatArray, most: int | None = None) -> list[tuple[int, ...]]:
    """Return the results of ``partition_layers`` for 1 stage up to ``most``, at most as many as layers."""
    return _partitions(np.asarray(layer_s, np.float64).tobytes(), min(most or len(layer_s), len(layer_s)))


@lru_cache(maxsize=512)
def _partitions(layer_s: bytes, most: int) -> list[tuple[int, ...]]:
    best = [_best_cuts(layer_s, stages) for stages in range(1, most + 1)]
    cuts = [cut.tolist() for _, cut in best]
    splits = []
    for stages in range(most):
        bounds = [len(cuts[0]) - 1]
        for cut in cuts[stages:0:-1]:
            bounds.append(cut[bounds[-1]])
        splits.append(tuple(end - start for start, end in pairwise([0, *reversed(bounds)])))
    return splits


def spread_blocks(num_layers: int, num_stages: int) -> tuple[int, ...] | None:
    """Spread blocks evenly over stages, with embedding and head at the ends, as Megatron-LM does; None if too few."""
    layers = np.array([len(part) for part in np.array_split(np.arange(num_layers - 2), num_stages)])
    if not layers[-1]:
        return None
    layers[0] += 1
    layers[-1] += 1
    return tuple(layers.tolist())


def slowest_stages_s(layer_s: FloatArray) -> FloatArray:
    """Return the slowest stage's seconds in the best partition into 1, 2, ... stages ``[layers]``."""
    layers = np.asarray(layer_s, np.float64).tobytes()
    return np.array([_best_cuts(layers, stages)[0][-1] for stages in range(1, len(layer_s) + 1)])


# Planners repeatedly split the same layers into every number of stages.
@lru_cache(maxsize=4096)
def _best_cuts(layer_s: bytes, num_stages: int) -> tuple[FloatArray, IntArray]:
    """Return F, the slowest stage of the first l layers in k stages, and the cuts l' ``[layers + 1]``."""
    span = _spans_s(layer_s)
    if num_stages == 1:
        return span[0], np.zeros(len(span), np.int64)
    slowest = np.maximum(_best_cuts(layer_s, num_stages - 1)[0][:, None], span)
    return slowest.min(axis=0), slowest.argmin(axis=0)


@lru_cache(maxsize=64)
def _spans_s(layer_s: bytes) -> FloatArray:
    """Seconds of layers l'+1..l, infinite for none ``[l', l]``; rounded, so that of equal cuts the earliest wins."""
    prefix = np.concatenate(([0.0], np.cumsum(np.frombuffer(layer_s, np.float64))))
    later = np.triu(np.ones((len(prefix), len(prefix)), bool), 1)
    return np.where(later, decisive(prefix[None, :] - prefix[:, None]), np.inf)


def stage_sums(layer_s: FloatArray, layers_per_stage: Sequence[int]) -> FloatArray:
    """Return the sum of a per-layer quantity over each stage ``[stages]``."""
    return np.add.reduceat(layer_s, np.cumsum([0, *layers_per_stage[:-1]]))


def place_chain(
    job: Job,
    degrees: Degrees,
    layers: Sequence[tuple[int, ...]],
    recompute: Sequence[bool],
    leading: bool,
    virtual_stages: int = 1,
    virtual_order: str = "loop",
    split_backward: bool = False,
) -> Layout:
    """Place homogeneous replicas: encoder, LLM and generator stages form one chain.

    All encoders share stages, and all generators: stages of their own if ``leading``, else the LLM's first and last.
    ``degrees.pp`` rank groups hold ``virtual_stages`` each (``place_ranks``); ``layers`` are those of each stage.
    """
    ranks = chain_ranks(job, degrees)
    modules = []
    rank_of_place = place_ranks(degrees.pp, virtual_stages, virtual_order)
    firsts = chain_starts(job.model, len(rank_of_place), layers, leading)
    for module, first, split, again in zip(job.model.modules, firsts, layers, recompute, strict=True):
        held = np.ascontiguousarray(ranks[:, rank_of_place[first : first + len(split)]])
        modules.append(ModuleLayout(module.name, degrees.tp, degrees.cp, split, held, again))
    return checked_layout(job, modules, job.num_microbatches(degrees.dp), split_backward=split_backward)


def replica_ranks(dp: int, pp: int, width: int) -> IntArray:
    """Return consecutive ranks of replicas with equally wide stages ``[dp, pp, width]``."""
    return np.arange(dp * pp * width).reshape(dp, pp, width)


def chain_ranks(job: Job, degrees: Degrees) -> IntArray:
    """Return the ranks of homogeneous replicas ``[dp, pp, width]``: consecutive in a replica, or in a stage.

    Replicas of a model with experts have consecutive ranks in a stage, because they exchange tokens in every layer:
    the order of Megatron-LM.
    """
    width = degrees.tp * degrees.cp
    if job.model.llm.config.experts is None:
        return replica_ranks(degrees.dp, degrees.pp, width)
    return np.ascontiguousarray(replica_ranks(degrees.pp, degrees.dp, width).swapaxes(0, 1))


def checked_layout(job: Job, modules: Sequence[ModuleLayout], num_microbatches: int, **assumed: Any) -> Layout:
    """Return the layout of the modules, with sharding and EP as the job asks; ``UserError`` if it cannot be."""
    kind = job.request.sharding or ZERO1
    sharded = (sharded_as(placed, kind, job.cluster.gpus_per_node) for placed in modules)
    placed = (with_experts(job, one, module) for one, module in zip(sharded, job.model.modules, strict=True))
    layout = Layout(tuple(placed), num_microbatches, **assumed)
    check_layout(layout, job.model, job.cluster)
    return layout


def place_ranks(num_ranks: int, virtual_stages: int, virtual_order: str = "loop") -> IntArray:
    """Rank (block) of each virtual stage ``[stages]``: round the ranks (``loop``), or down and back up (``v``)."""
    turn, rank = np.divmod(np.arange(num_ranks * virtual_stages), num_ranks)
    upwards = virtual_order == "v"
    return np.where(upwards & (turn % 2 == 1), num_ranks - 1 - rank, rank)


def place_cuts(job: Job, degrees: Degrees, layers: Sequence[int], recompute: Sequence[bool]) -> Layout:
    """Place homogeneous replicas whose stages, in turn on PP ranks, cut one chain of the layers of all modules."""
    bounds = np.cumsum([0, *layers])
    ranks = chain_ranks(job, degrees)
    modules = []
    first = 0
    for module, again in zip(job.model.modules, recompute, strict=True):
        held = np.diff(np.clip(bounds, first, first + len(module.layers)))
        stages = np.flatnonzero(held)
        placed = np.ascontiguousarray(ranks[:, stages % degrees.pp])
        modules.append(ModuleLayout(module.name, degrees.tp, degrees.cp, tuple(held[stages].tolist()), placed, again))
        first += len(module.layers)
    return checked_layout(job, modules, job.num_microbatches(degrees.dp))


def mean_length(lengths: IntArray) -> int:
    """Return the mean of lengths, rounded, at least 1; 1 for none."""
    return max(1, round(float(lengths.mean()))) if len(lengths) else 1


def average_layer_s(profile: Profile, samples: SampleShapes, tp: int, cp: int) -> list[FloatArray]:
    """Return measured seconds of both passes of every layer on a mean microbatch, one array ``[layers]`` per module.

    A module that ``tp`` does not split has its widest TP below. Padding is that of microbatches in order of arrival.
    """
    multiple = profile.job.framework.padding_multiple
    if multiple is not None:
        microbatch = np.arange(len(samples)) // profile.job.microbatch_size
        samples = pad_samples(samples, ModuleAssignment(np.zeros_like(microbatch), microbatch), multiple)
    costs = []
    for module in profile.job.model.modules:
        lengths = module.lengths(samples, module.units(samples))
        count = max(1, round(profile.job.microbatch_size * len(lengths) / len(samples)))
        layer_s = profile.layers.layer_s(module, np.full(count, mean_length(lengths)), widest_tp(module, tp), cp)
        costs.append(layer_s if len(lengths) else np.zeros(len(module.layers)))
    return costs


def named_degrees(request: LayoutRequest) -> str:
    """Return the requested degrees as a user writes them; ``layout`` if there are none."""
    given = {name: getattr(request, name) for name in ("tp", "cp", "pp", "dp")}
    return " ".join(f"layout.{name}={degree}" for name, degree in given.items() if degree) or "layout"


def chain_starts(model: ModelSpec, pp: int, layers: Sequence[tuple[int, ...]], leading: bool) -> list[int]:
    """Return the first stage of each module in a chain of ``pp`` stages; arguments as for ``place_chain``."""
    ahead = max((len(layers[index]) for index in range(model.llm_index)), default=0) if leading else 0
    first = {Role.ENCODER: 0, Role.LLM: ahead}
    return [first.get(module.role, pp - len(split)) for module, split in zip(model.modules, layers, strict=True)]


def widest_tp(module: ModuleSpec, tp: int) -> int:
    """Return the largest tensor-parallel degree that splits a module and divides ``tp``."""
    return max(degree for degree in divisors(tp) if module.splits_into(degree))


def tensor_degrees(job: Job, modules: Sequence[ModuleSpec]) -> list[int]:
    """Return the divisors of a node that divide the heads, key-value heads and feed-forward width of all modules."""
    configs = [module.config for module in modules]
    sizes = [size for config in configs for size in (config.num_heads, config.num_kv_heads, config.ffn_hidden_size)]
    return [tp for tp in divisors(job.cluster.gpus_per_node) if all(size % tp == 0 for size in sizes)]


@dataclass(frozen=True, slots=True)
class Island:
    """Layout of a module whose ranks are not chosen yet."""

    tp: int
    cp: int
    dp: int
    layers_per_stage: tuple[int, ...]
    recompute: bool = False


def place_islands(
    job: Job, islands: Sequence[Island], num_microbatches: int, single_rank_boundary: bool = False
) -> Layout:
    """Place encoders, LLM and generators on disjoint ranks: by replica if TP, CP and DP are equal, else by group."""
    groups = job.model.module_groups
    firsts = [islands[group[0]] for group in groups]
    shapes = [(island.dp, len(island.layers_per_stage), island.tp * island.cp) for island in firsts]
    grids = [replica_ranks(*shape) for shape in shapes]
    if len({(island.tp, island.cp, island.dp) for island in firsts}) == 1:
        dp, _, width = shapes[0]
        cuts = np.cumsum([pp for _, pp, _ in shapes])
        chain = replica_ranks(dp, int(cuts[-1]), width)
        grids = [np.ascontiguousarray(part) for part in np.split(chain, cuts[:-1], axis=1)]
    else:
        start = 0
        for index in sorted(range(len(groups)), key=lambda index: -firsts[index].tp):
            grids[index] = grids[index] + start
            start += grids[index].size
    modules = []
    for grid, group in zip(grids, groups, strict=True):
        for index in group:
            island = islands[index]
            name = job.model.modules[index].name
            modules.append(ModuleLayout(name, island.tp, island.cp, island.layers_per_stage, grid, island.recompute))
    return checked_layout(job, modules, num_microbatches, single_rank_boundary=single_rank_boundary)


def recompute_choices(
    job: Job, groups: Sequence[Sequence[int]] | None = None, chosen_later: bool = False
) -> list[tuple[bool, ...]]:
    """Return the combinations of groups (by default single modules) to recompute, or the one that a job requests.

    Those of a free job obey its ``recompute_rule``.
    """
    groups = [(index,) for index in range(len(job.model.modules))] if groups is None else groups
    asked = job.request.recompute
    if asked is None:
        (llm,) = (index for index, group in enumerate(groups) if job.model.llm_index in group)
        choices = product([False] if chosen_later else [False, True], repeat=len(groups))
        match job.request.recompute_rule:
            case "with_llm":
                return [again for again in choices if again[llm] or not any(again)]
            case "together":
                return [again for again in choices if len({*again}) == 1]
            case _:
                return [*choices]
    again = [[job.model.modules[index].name in asked for index in group] for group in groups]
    if any(len({*group}) > 1 for group in again):
        together = "this planner recomputes all modules of a rank, or none"
        raise IncompatibleError(f"layout.recompute={[*asked]}: {together}. Name all modules that share ranks")
    return [tuple(all(group) for group in again)]


def recompute_factor(recompute: bool) -> float:
    """Return the time of forward and backward relative to no recomputation; a backward takes about two forwards."""
    return 4 / 3 if recompute else 1.0


@dataclass(frozen=True, slots=True)
class GivenPlanner:
    """Takes the layout of a plan's file; nothing is measured or searched.

    Attributes:
        path: the file (``program.plan_file``).
    """

    handles_generators: ClassVar[bool] = True
    shardings: ClassVar[tuple[str, ...]] = SHARDINGS  # the one of the file

    path: str

    def plan(self, profile: Profile, make_program: MakeProgram) -> Layout:  # noqa: ARG002
        """Return the layout of the file; ``UserError`` if it is no plan, or does not fit the job's model or cluster."""
        layout = read_plan(self.path).layout
        check_layout(layout, profile.job.model, profile.job.cluster)
        return layout

    def fingerprint(self) -> str:
        """Return the hash of the file, which is a part of a run's key."""
        return plan_fingerprint(self.path)
