"""DIP (arXiv:2504.14145): each module in segments of its own on all ranks of a pipeline, in a searched order.

The LLM takes whole microbatches, other modules sub-microbatches just large enough to be efficient. Segments of all
modules interleave on every rank by compiled UCT (Kocsis and Szepesvari, ECML 2006) over orders of microbatches, scored
by the list scheduler. A move puts one of the remaining elements next; a node counts as good as its best rollout.
Rollouts stay near the best order so far, and nodes widen slowly (Coulom, CG 2006).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Annotated, ClassVar, NamedTuple

import numpy as np

from entrain_bench.balancing.candidates import Candidate, by_estimate
from entrain_bench.balancing.chunk_estimates import covered_layer_s, packed_durations, stages_s
from entrain_bench.balancing.chunk_groups import Replica, split_replicas
from entrain_bench.balancing.interface import MakeProgram
from entrain_bench.balancing.listing import Wish, list_schedule
from entrain_bench.balancing.lpt import arrival_places, place_in_group
from entrain_bench.balancing.options import Memory, TrialOptions
from entrain_bench.balancing.planning import (
    checked_layout,
    mean_length,
    partition_layers,
    recompute_choices,
    recompute_factor,
    stage_sums,
)
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.recomputation import Recomputation, recompute_all, recompute_by_chunk
from entrain_bench.balancing.schedules import ordered_program, unordered_program
from entrain_bench.balancing.tuning import chosen_layout
from entrain_bench.base.arithmetic import LN_2, decisive, log2, matmul
from entrain_bench.base.arrays import BoolArray, FloatArray, IntArray, offsets_from_counts
from entrain_bench.base.compiled import in_threads, njit
from entrain_bench.base.errors import DeadlockError, IncompatibleError
from entrain_bench.program import Program
from entrain_bench.program.assignment import Assignment, Chunks, ModuleAssignment
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.specs.job import Degrees, Job
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.parse import Count, OneOf, between
from entrain_bench.specs.shapes import SampleShapes

# Packed tokens at which a module's efficiency counts as its peak.
PEAK_TOKENS = 131_072
# Share of a module's peak throughput that a sub-microbatch must reach.
EFFICIENCY = 0.95
# Sequence whose layer times split a module that no profiled sample exercises.
FALLBACK_TOKENS = 1024
# Weight of exploration for scores scaled to [0, 1].
EXPLORATION = 0.2
# Elements that a rollout takes out of the best order and puts elsewhere, on average.
MOVED = 8.0
TINY = np.finfo(np.float64).tiny
ROOT = 0
NONE = -1
# Every rollout is a node in the tree of every set of lanes, all of which a step looks at.
MAX_ROUNDS = 2**14


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
    """B_i: the fewest items of mean length with ``EFFICIENCY`` of the peak throughput up to ``PEAK_TOKENS``."""
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
    most = next(size for size, value in zip(sizes, measured, strict=True) if value >= wanted)
    # Between the last power of two that falls short and the first that does not.
    return next((size for size in range(most // 2 + 1, most) if throughput(size) >= wanted), most)


def sub_microbatches(replica: IntArray, microbatch: IntArray, most: int) -> IntArray:
    """Place of each item's sub-microbatch in its replica's order; N items form ceil(N / most) of nearly equal size."""
    key = replica * (1 + int(microbatch.max(initial=0))) + microbatch
    _, first_item, group, size = np.unique(key, return_index=True, return_inverse=True, return_counts=True)
    count = -(-size // most)
    before = offsets_from_counts(count)[:-1]
    # Groups are sorted by replica: count from the first group of each.
    owner = replica[first_item]
    before = before - before[np.searchsorted(owner, owner)]
    return np.asarray(before[group] + place_in_group(group) * count[group] // size[group])


@dataclass(frozen=True, slots=True)
class DipPlanner(TrialOptions):
    """Colocates K_i stages of every module i on every rank; a module's stages are balanced separately.

    Attributes:
        profile_samples: samples the layers are measured on; 4 is the one microbatch that arXiv:2605.27918 plans DIP by.
        chunks: K_i: ``rule`` as in the paper, ``one``, or ``auto`` for the faster by estimated time.
    """

    handles_generators: ClassVar[bool] = True
    profile_samples: Count = 4
    chunks: Annotated[str, OneOf(("auto", "one", "rule"))] = "auto"
    num_trials: Count = 1

    def plan(self, profile: Profile, make_program: MakeProgram) -> Layout:
        """Return the layout with the least estimated time of a profiled batch among those that fit memory."""
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
        """Every degree, K_i and recomputation: the layout, seconds of every layer on ``samples``, and K_i."""
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
        """Return the layouts with their estimated time on one batch; recomputation is chosen by the schedule's time."""
        for layout, _, chunks in self._layouts(profile, samples, make_program):
            try:
                # The order that the search begins with tells layouts apart as well as the one it ends with (docs).
                seconds = believed_s(profile, make_program.draft(batch, layout))
            except DeadlockError as error:
                raise IncompatibleError(
                    "strategy.scheduler: cannot order modules on the same ranks, where strategy/planner=dip places them"
                ) from error
            except IncompatibleError:
                # Other orders may take only one stage per rank.
                if self.chunks != "auto" or max(chunks) == 1:
                    raise
                continue
            yield Candidate(seconds + profile.programs.step_s(layout), layout)

    def _chunk_choices(self, profile: Profile, samples: SampleShapes, degrees: Degrees) -> list[tuple[int, ...]]:
        """K_i of every module, for each layout to consider."""
        one = (1,) * len(profile.job.model.modules)
        rule = one if self.chunks == "one" else chunks_per_rank(profile, samples, degrees)
        return [rule] if self.chunks == "rule" or rule == one else [one, rule]


def chunks_per_rank(profile: Profile, samples: SampleShapes, degrees: Degrees) -> tuple[int, ...]:
    """K_i = floor(T_i / T_1): chunks of each module on a rank, so that segments take about equally long.

    T_i is the measured time of both passes on B_i items of mean length, or a microbatch of mean samples; T_1 is the
    least. K_i is at least 1 and leaves every stage a layer.
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
    # Modules without items count one chunk.
    ratio = decisive(np.where(np.isfinite(seconds), seconds, seconds.min()) / seconds.min())
    most = [max(1, len(module.layers) // degrees.pp) for module in modules]
    return tuple(min(int(k), limit) for k, limit in zip(ratio, most, strict=True))


def colocate(job: Job, degrees: Degrees, layers: Sequence[tuple[int, ...]], recompute: Sequence[bool]) -> Layout:
    """All modules of a replica on the same consecutive blocks of TP x CP ranks; stages go round the blocks.

    With fewer stages than blocks, encoders leave out the last blocks, the LLM and generators the first ones.
    """
    width = degrees.tp * degrees.cp
    ranks = np.arange(degrees.dp * degrees.pp * width).reshape(degrees.dp, degrees.pp, width)
    modules = []
    for module, split, again in zip(job.model.modules, layers, recompute, strict=True):
        first = 0 if module.is_encoder else max(0, degrees.pp - len(split))
        held = ranks[:, (first + np.arange(len(split))) % degrees.pp]
        modules.append(ModuleLayout(module.name, degrees.tp, degrees.cp, split, held, again))
    return checked_layout(job, modules, job.num_microbatches(degrees.dp))


def chunk_s(
    module: ModuleSpec,
    placed: ModuleLayout,
    shapes: SampleShapes,
    chunks: Chunks,
    profile: Profile,
    remade: IntArray | None = None,
) -> tuple[FloatArray, FloatArray]:
    """Estimated seconds of forward and backward of each chunk on each stage ``[chunks, stages]``.

    A backward takes two forwards, less if layers are frozen, and one more for recomputed layers.
    """
    forward, share = stages_s(module, placed, shapes, chunks, profile)
    backward = forward * (3.0 * recompute_factor(placed.recompute) - 1.0) * share
    if remade is not None and not placed.recompute:
        backward = backward + remade * covered_layer_s(module, placed, shapes, chunks, profile)
    return forward, backward


def believed_s(profile: Profile, program: Program) -> float:
    """Return the estimated seconds of a program up to its last backward, without transfers."""
    duration = np.zeros(program.num_actions)
    duration[: program.first_action[-1]] = packed_durations(program, profile, chunk_s)
    return float(profile.programs.simulate(program, duration).max())


def listed_replicas(draft: Program, assignment: Assignment, profile: Profile) -> list[Replica]:
    """Return the replicas of a program, independent of its own order; their groups are microbatches."""
    change, working = (values[: draft.first_action[-1]] for values in profile.memory.action_bytes(draft))
    return split_replicas(draft, assignment, profile, packed_durations(draft, profile, chunk_s), change, working)


class Tree(NamedTuple):
    """The search for the order of some elements with the least score, one proposal at a time."""

    # The best order so far, and the order to score ``[elements]``.
    order: IntArray
    proposed: IntArray
    scores: FloatArray  # of the best order and of the worst one so far, infinite before the first ``[2]``
    lengths: IntArray  # nodes, and nodes on the path to the proposal ``[2]``
    path: IntArray  # nodes from the root to where the proposal was completed ``[elements + 1]``
    # By node, in the order in which they were found ``[nodes]``: its parent, the element that it puts next, proposals
    # that went through it, their least score, and whether all orders below it were scored.
    parent: IntArray
    move: IntArray
    visits: IntArray
    best: FloatArray
    finished: BoolArray
    spread: FloatArray  # exploration of a node's children by the node's visits ``[proposals + 1]``


def exploration(num_proposals: int) -> FloatArray:
    """Return ``spread`` of a tree for ``num_proposals`` proposals ``[proposals + 1]``."""
    visits = np.maximum(np.arange(num_proposals + 1), 1)
    return EXPLORATION * np.sqrt(log2(visits) * LN_2)


def new_tree(num_elements: int, spread: FloatArray) -> Tree:
    """A tree before its first proposal; ``spread`` says how many it takes."""
    num_nodes = len(spread)
    finished = np.zeros(num_nodes, np.bool_)
    finished[ROOT] = num_elements == 0
    return Tree(
        order=np.arange(num_elements),
        proposed=np.arange(num_elements),
        scores=np.array([np.inf, -np.inf]),
        lengths=np.array([1, 1]),
        path=np.zeros(num_elements + 1, np.int64),
        parent=np.full(num_nodes, NONE),
        move=np.full(num_nodes, NONE),
        visits=np.zeros(num_nodes, np.int64),
        best=np.full(num_nodes, np.inf),
        finished=finished,
        spread=spread,
    )


@njit(nogil=True)
def propose(tree, rng):  # type: ignore[no-untyped-def]
    """Make the next proposal: the order 0, 1, 2, ... first, and the best one again once all orders are scored."""
    tree.proposed[:] = tree.order
    node = ROOT
    depth = 0
    while tree.visits[node] > 0 and not tree.finished[ROOT]:
        place = _select(tree, node, depth, rng)
        children = _children(tree, node)
        same = children[tree.move[children] == tree.proposed[place]]
        parent = node
        node = same[0] if len(same) else tree.lengths[0]
        if not len(same):
            tree.parent[node] = parent
            tree.move[node] = tree.proposed[place]
            tree.lengths[0] += 1
        _put(tree.proposed, place, depth)
        depth += 1
        tree.path[depth] = node
    tree.lengths[1] = depth + 1
    num_left = len(tree.proposed) - depth
    if depth > 0 and num_left > 1:
        for _ in range(rng.poisson(MOVED)):
            place = depth + rng.integers(0, num_left)
            _put(tree.proposed, place, depth + rng.integers(0, num_left))


@njit()
def _children(tree, node):  # type: ignore[no-untyped-def]
    return np.flatnonzero(tree.parent[: tree.lengths[0]] == node)


@njit()
def _put(order, place, goal):  # type: ignore[no-untyped-def]
    """Move the element at one place of an order to another place."""
    element = order[place]
    step = 1 if goal > place else -1
    while place != goal:
        order[place] = order[place + step]
        place += step
    order[goal] = element


@njit()
def _select(tree, node, depth, rng):  # type: ignore[no-untyped-def]
    """Place in the proposal of the next element: of the unfinished child with the highest bound, or of a new one."""
    children = _children(tree, node)
    num_fresh = len(tree.proposed) - depth - len(children)
    chosen = NONE
    chosen_bound = -np.inf
    span = max(tree.scores[1] - tree.scores[0], TINY)
    spread = tree.spread[tree.visits[node]]
    is_tried = np.zeros(len(tree.proposed), np.bool_)
    for child in children:
        is_tried[tree.move[child]] = True
        if not tree.finished[child]:
            bound = (tree.scores[1] - tree.best[child]) / span + spread / np.sqrt(tree.visits[child])
            if chosen == NONE or bound > chosen_bound:
                chosen = child
                chosen_bound = bound
    left = tree.proposed[depth:]
    if num_fresh > 0 and (chosen == NONE or len(children) < np.sqrt(tree.visits[node] + 1)):
        # The next one in the best order is tried before all others.
        skipped = rng.integers(0, num_fresh) if len(children) > 0 else 0
        return depth + np.flatnonzero(~is_tried[left])[skipped]
    return depth + np.flatnonzero(left == tree.move[chosen])[0] if chosen != NONE else depth


@njit(nogil=True)
def learn(tree, score):  # type: ignore[no-untyped-def]
    """Take the score of the last proposal; returns whether it is the best so far."""
    better = score < tree.scores[0]
    if better:
        tree.order[:] = tree.proposed
        tree.scores[0] = score
    tree.scores[1] = max(tree.scores[1], score)
    for depth in range(tree.lengths[1] - 1, -1, -1):
        node = tree.path[depth]
        tree.visits[node] += 1
        tree.best[node] = min(tree.best[node], score)
        num_left = len(tree.order) - depth
        children = _children(tree, node)
        tree.finished[node] = num_left <= 1 or (len(children) == num_left and np.all(tree.finished[children]))
    return better


def best_slots(draft: Program, replicas: Sequence[Replica], rounds: int, by_module: bool = False) -> IntArray:
    """Return each action's slot in the best estimated order of groups, or ``by_module`` of modules ``[actions]``."""
    num_actions = int(draft.first_action[-1])
    spread = exploration(rounds + 1)
    slot = np.zeros(num_actions, np.int64)
    per_group = len(draft.model.modules) if by_module else 1

    def search(one: int) -> None:
        replica = replicas[one]
        element = replica.group * per_group + (draft.module[replica.numbers] if by_module else 0)
        place = np.zeros(len(element), np.int64)
        # The same moves in every iteration: the same batch always gets the same order.
        search_set(
            rounds + 1,
            new_tree((1 + int(replica.group.max())) * per_group, spread),
            np.random.default_rng(one),
            per_group,
            float(num_actions),
            (replica.group, element, replica.rank),
            replica.actions,
            place,
        )
        slot[replica.numbers] = place

    in_threads(search, len(replicas))
    return slot


@njit(nogil=True)
def search_set(  # type: ignore[no-untyped-def]
    num_rollouts, tree, rng, per_group, spread, labels, actions, best_place
):
    """More rollouts of a replica, none if all orders are scored; ``best_place`` takes the best order ``[actions]``."""
    group, element, rank = labels
    # By the place of their element, then by rank, which is below ``spread``; groups by the first of their elements.
    place = np.empty(len(tree.order), np.int64)
    group_place = np.empty(len(tree.order) // per_group, np.int64)
    turn = np.empty_like(best_place)
    for _ in range(num_rollouts):
        propose(tree, rng)
        num_seen = 0
        group_place[:] = -1
        for index in range(len(place)):
            place[tree.proposed[index]] = index
            its_group = tree.proposed[index] // per_group
            if group_place[its_group] < 0:
                group_place[its_group] = num_seen
                num_seen += 1
        wish = Wish(group_place[group], place[element] * spread + rank)
        end_s, _ = list_schedule(actions, wish, turn)
        if learn(tree, end_s):
            best_place[:] = turn
        if tree.finished[ROOT]:
            break


@dataclass(frozen=True, slots=True)
class DipScheduler(Recomputation):
    """Orders the actions of every rank.

    Attributes:
        search_rounds: rollouts of the tree search over the order of microbatches; 0 keeps the order of arrival.
        priorities: elements that the search orders: ``modality`` (a module's part of a microbatch) or ``microbatch``.
    """

    handles_generators: ClassVar[bool] = True
    search_rounds: Annotated[int, between(0, MAX_ROUNDS)] = 16
    priorities: Annotated[str, OneOf(("microbatch", "modality"))] = "modality"
    memory: Memory = field(default="greedy", kw_only=True)

    def draft(self) -> DipScheduler:
        """The greedy order, with which the search begins."""
        return replace(self, search_rounds=0)

    def schedule(self, shapes: SampleShapes, layout: Layout, assignment: Assignment, profile: Profile) -> Program:
        """The program; ``IncompatibleError`` if modules share some ranks with different TP or CP."""
        if any(np.any(np.diff(blocks.offsets) != 1) for blocks in layout.blocks):
            raise IncompatibleError(
                "strategy.scheduler: DIP's interleaver needs the same TP x CP for modules on the same ranks"
            )
        draft = unordered_program(profile.job.model, shapes, layout, assignment)
        if not self.chooses_recomputation or profile.job.request.recompute is not None:
            return self._ordered(draft, assignment, profile)
        frugal = recompute_by_chunk(self._ordered(recompute_all(draft), assignment, profile), profile)
        # Another choice of recomputation may deserve another order, which may leave memory for more.
        again = recompute_by_chunk(self._ordered(frugal, assignment, profile), profile)
        seconds = decisive(np.array([believed_s(profile, program) for program in (frugal, again)]))
        return frugal if seconds[0] <= seconds[1] else again

    def _ordered(self, draft: Program, assignment: Assignment, profile: Profile) -> Program:
        """The program in the order that the search finds."""
        replicas = listed_replicas(draft, assignment, profile)
        by_module = self.priorities == "modality"
        return ordered_program(draft, best_slots(draft, replicas, self.search_rounds, by_module))
