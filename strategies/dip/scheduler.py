"""DIP's schedule: segments of all modules interleaved on every rank, in an order that a tree search finds.

Compiled UCT (Kocsis and Szepesvari, ECML 2006) over orders of microbatches, scored by the list scheduler. A move puts
one of the remaining elements next; a node counts as good as its best rollout. Rollouts stay near the best order so far,
and nodes widen slowly (Coulom, CG 2006).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, NamedTuple

import numpy as np

from entrain_bench.balancing.chunk_estimates import covered_layer_s, packed_durations, stages_s
from entrain_bench.balancing.chunk_groups import Replica, split_replicas
from entrain_bench.balancing.listing import Wish, list_schedule
from entrain_bench.balancing.options import Memory
from entrain_bench.balancing.planning import recompute_factor
from entrain_bench.balancing.profile import Profile
from entrain_bench.balancing.recomputation import Recomputation, recompute_all, recompute_by_chunk
from entrain_bench.balancing.schedules import ordered_program, unordered_program
from entrain_bench.base.arithmetic import LN_2, decisive, log2
from entrain_bench.base.arrays import BoolArray, FloatArray, IntArray
from entrain_bench.base.compiled import in_threads, njit
from entrain_bench.base.errors import IncompatibleError
from entrain_bench.program import Program
from entrain_bench.program.assignment import Assignment, Chunks
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.specs.parse import OneOf, between
from entrain_bench.specs.shapes import SampleShapes

# Weight of exploration for scores scaled to [0, 1].
EXPLORATION = 0.2
# Elements that a rollout takes out of the best order and puts elsewhere, on average.
MOVED = 8.0
TINY = np.finfo(np.float64).tiny
ROOT = 0
NONE = -1
# Every rollout is a node in the tree of every set of lanes, some 60 bytes each.
MAX_ROUNDS = 2**20


def chunk_s(
    module: ModuleSpec,
    placed: ModuleLayout,
    shapes: SampleShapes,
    chunks: Chunks,
    profile: Profile,
    remade: IntArray | None = None,
) -> tuple[FloatArray, FloatArray]:
    """Estimated seconds of forward and backward of each chunk on each stage ``[chunks, stages]``.

    A backward takes two forwards, and one more if activations are recomputed; less where layers are frozen. Of layers
    that chunks recompute one by one (``remade``), the backward takes one more forward of these.
    """
    forward, share = stages_s(module, placed, shapes, chunks, profile)
    backward = forward * (3.0 * recompute_factor(placed.recompute) - 1.0) * share
    if remade is not None and not placed.recompute:
        backward = backward + remade * covered_layer_s(module, placed, shapes, chunks, profile)
    return forward, backward


def believed_s(profile: Profile, program: Program) -> float:
    """Believed time of a program up to its last backward, without transfers, seconds."""
    duration = np.zeros(program.num_actions)
    duration[: program.first_action[-1]] = packed_durations(program, profile, chunk_s)
    return float(profile.programs.simulate(program, duration).max())


def listed_replicas(draft: Program, assignment: Assignment, profile: Profile) -> list[Replica]:
    """The replicas of a program, whatever its own order; their groups are microbatches.

    Passes of a chunk through one stage on each rank are its *segments* (arXiv:2504.14145).
    """
    change, working = profile.memory.action_bytes(draft)
    passes = slice(int(draft.first_action[-1]))
    seconds = packed_durations(draft, profile, chunk_s)
    return split_replicas(draft, assignment, profile, seconds, change[passes], working[passes])


class Tree(NamedTuple):
    """The search for the order of some elements with the least score, one proposal at a time."""

    # The best order so far, and the order to score ``[elements]``.
    order: IntArray
    proposed: IntArray
    scores: FloatArray  # of the best order and of the worst one so far, infinite before the first ``[2]``
    lengths: IntArray  # nodes, and nodes on the path to the proposal ``[2]``
    path: IntArray  # nodes from the root to where the proposal was completed ``[elements + 1]``
    move: IntArray  # element that a node puts next ``[nodes]``
    # Children in the order in which they were found ``[nodes]``.
    first_child: IntArray
    last_child: IntArray
    next_sibling: IntArray
    num_children: IntArray
    # Proposals that went through a node, and their least score ``[nodes]``.
    visits: IntArray
    best: FloatArray
    finished: BoolArray  # whether all orders below it were scored ``[nodes]``
    spread: FloatArray  # exploration of a node's children by the node's visits ``[proposals + 1]``


def exploration(num_proposals: int) -> FloatArray:
    """``spread`` of trees that take so many proposals ``[proposals + 1]``."""
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
        move=np.full(num_nodes, NONE),
        first_child=np.full(num_nodes, NONE),
        last_child=np.full(num_nodes, NONE),
        next_sibling=np.full(num_nodes, NONE),
        num_children=np.zeros(num_nodes, np.int64),
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
        move = tree.proposed[place]
        _put(tree.proposed, place, depth)
        node = _child(tree, node, move)
        depth += 1
        tree.path[depth] = node
    tree.lengths[1] = depth + 1
    num_left = len(tree.proposed) - depth
    if depth > 0 and num_left > 1:
        for _ in range(rng.poisson(MOVED)):
            place = depth + rng.integers(0, num_left)
            _put(tree.proposed, place, depth + rng.integers(0, num_left))


@njit()
def _put(order, place, goal):  # type: ignore[no-untyped-def]
    """Take out what is at one place of an order and put it in at another."""
    element = order[place]
    step = 1 if goal > place else -1
    while place != goal:
        order[place] = order[place + step]
        place += step
    order[goal] = element


@njit()
def _select(tree, node, depth, rng):  # type: ignore[no-untyped-def]
    """Place in the proposal of the next element: of the unfinished child with the highest bound, or of a new one."""
    num_fresh = len(tree.proposed) - depth - tree.num_children[node]
    chosen = NONE
    chosen_bound = -np.inf
    span = max(tree.scores[1] - tree.scores[0], TINY)
    spread = tree.spread[tree.visits[node]]
    child = tree.first_child[node]
    while child != NONE:
        if not tree.finished[child]:
            bound = (tree.scores[1] - tree.best[child]) / span + spread / np.sqrt(tree.visits[child])
            if chosen == NONE or bound > chosen_bound:
                chosen = child
                chosen_bound = bound
        child = tree.next_sibling[child]
    if num_fresh > 0 and (chosen == NONE or tree.num_children[node] < np.sqrt(tree.visits[node] + 1)):
        # What comes next in the best order is tried before all others.
        skipped = rng.integers(0, num_fresh) if tree.num_children[node] > 0 else 0
        for place in range(depth, len(tree.proposed)):
            if _find(tree, node, tree.proposed[place]) == NONE:
                if skipped == 0:
                    return place
                skipped -= 1
    for place in range(depth, len(tree.proposed)):
        if tree.proposed[place] == tree.move[chosen]:
            return place
    return depth


@njit()
def _find(tree, node, move):  # type: ignore[no-untyped-def]
    """The child of a node by a move, if there is one."""
    child = tree.first_child[node]
    while child != NONE and tree.move[child] != move:
        child = tree.next_sibling[child]
    return child


@njit()
def _child(tree, node, move):  # type: ignore[no-untyped-def]
    """The child of a node by a move, a new one if there was none."""
    child = _find(tree, node, move)
    if child == NONE:
        child = tree.lengths[0]
        tree.lengths[0] += 1
        tree.move[child] = move
        if tree.num_children[node] == 0:
            tree.first_child[node] = child
        else:
            tree.next_sibling[tree.last_child[node]] = child
        tree.last_child[node] = child
        tree.num_children[node] += 1
    return child


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
        tree.finished[node] = _is_finished(tree, node, len(tree.order) - depth)
    return better


@njit()
def _is_finished(tree, node, num_left):  # type: ignore[no-untyped-def]
    """Whether all orders of the elements that a node leaves were scored."""
    if num_left <= 1:
        return True
    child = tree.first_child[node]
    while child != NONE and tree.finished[child]:
        child = tree.next_sibling[child]
    return child == NONE and tree.num_children[node] == num_left


def best_slots(draft: Program, replicas: Sequence[Replica], rounds: int, by_module: bool = False) -> IntArray:
    """Slot of every action in the best believed order found, replica by replica ``[actions]``.

    The search orders groups, or with ``by_module`` each module's part of a group. The first rollout is the order of
    arrival; ``rounds`` more follow.
    """
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
    """More rollouts of a replica, none when all orders are scored; ``best_place`` takes its best order ``[actions]``.

    The place of its element in the proposed order is a segment's priority, then its rank in the group, which is below
    ``spread``. Groups come by the first of their elements. ``labels`` are group, element and rank ``[actions]``.
    """
    group, element, rank = labels
    place = np.empty(len(tree.order), np.int64)
    group_place = np.empty(len(tree.order) // per_group, np.int64)
    turn = np.empty_like(best_place)
    held = np.zeros_like(best_place)
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
        wish = Wish(group_place[group], place[element] * spread + rank, held, True, False)
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
        priorities: what the search orders: the part of each ``modality`` of every microbatch, or all of a
            ``microbatch``.
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
        # What is recomputed now may deserve another order, which may leave memory for more.
        again = recompute_by_chunk(self._ordered(frugal, assignment, profile), profile)
        seconds = decisive(np.array([believed_s(profile, program) for program in (frugal, again)]))
        return frugal if seconds[0] <= seconds[1] else again

    def _ordered(self, draft: Program, assignment: Assignment, profile: Profile) -> Program:
        """The program in the order that the search finds."""
        replicas = listed_replicas(draft, assignment, profile)
        by_module = self.priorities == "modality"
        return ordered_program(draft, best_slots(draft, replicas, self.search_rounds, by_module))
