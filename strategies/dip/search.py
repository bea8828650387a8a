"""DIP's search: a compiled Monte-Carlo tree search over orders of microbatches, scored by the list scheduler.

UCT (Kocsis and Szepesvari, ECML 2006), one player, exact scores. A node is the beginning of an order, a move puts one
of the remaining elements next, a rollout completes the order and scores it. Scores do not vary, so a node counts as
good as its best rollout, and finished subtrees are left alone: given enough rollouts the search has seen every order.
Rollouts stay near the best order so far (MOVED), and nodes widen slowly (as in Coulom, CG 2006), for a few dozen
rollouts must do for dozens of elements.
"""

from __future__ import annotations

from time import perf_counter
from typing import NamedTuple

import numpy as np

from entrain_bench.balancing.actions import Wish, room_for
from entrain_bench.balancing.chunk_groups import split_by_label
from entrain_bench.balancing.listing import list_schedule
from entrain_bench.base.arithmetic import LN_2, log2
from entrain_bench.base.arrays import BoolArray, FloatArray, IntArray
from entrain_bench.base.compiled import in_threads, njit

from .segments import ChunkSegments

# Weight of exploration for scores scaled to [0, 1].
EXPLORATION = 0.2
# Elements that a rollout takes out of the best order and puts elsewhere, on average.
MOVED = 8.0
TINY = np.finfo(np.float64).tiny
ROOT = 0
NONE = -1


class Tree(NamedTuple):
    """The search for the order of some elements with the least score, one proposal at a time.

    Attributes:
        order: the best order so far, at first 0, 1, 2, ... ``[elements]``.
        proposed: the order to score ``[elements]``.
        scores: of the best order and of the worst one so far, infinite before the first ``[2]``.
        lengths: nodes, and nodes on the path to the proposal ``[2]``.
        path: nodes from the root to where the proposal was completed ``[elements + 1]``.
        move: element that a node puts next ``[nodes]``.
        first_child, last_child, next_sibling: children in the order in which they were found ``[nodes]``.
        num_children: their number ``[nodes]``.
        visits: proposals that went through a node ``[nodes]``.
        best: least score of those ``[nodes]``.
        finished: whether all orders below it were scored ``[nodes]``.
        spread: exploration of a node's children by the node's visits ``[proposals + 1]``.
    """

    order: IntArray
    proposed: IntArray
    scores: FloatArray
    lengths: IntArray
    path: IntArray
    move: IntArray
    first_child: IntArray
    last_child: IntArray
    next_sibling: IntArray
    num_children: IntArray
    visits: IntArray
    best: FloatArray
    finished: BoolArray
    spread: FloatArray


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
    """Where in the proposal the next element is: a child's, or a new one's when the node is due for it.

    Of the unfinished children it is that of the highest upper confidence bound.
    """
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


def best_slots(segments: ChunkSegments, rounds: int, seconds: float | None = None) -> IntArray:
    """Slot of every action in the best believed order found, set by set ``[actions]``.

    A tree search a set. The first rollout is the order of arrival, so nothing is believed slower than that; ``rounds``
    more follow, none of which starts after so many ``seconds`` of wall time.
    """
    started = perf_counter()
    num_sets = len(segments.num_groups)
    num_actions = len(segments.actions.lanes)
    set_actions = split_by_label(segments.lane_set[segments.actions.lanes], num_sets)
    actions = [
        segments.actions.of(members, np.flatnonzero(segments.lane_set == one))
        for one, members in enumerate(set_actions)
    ]
    states = [room_for(set_list, count) for set_list, count in zip(actions, segments.num_groups.tolist(), strict=True)]
    spread = exploration(rounds + 1)
    trees = [new_tree(count * segments.per_group, spread) for count in segments.num_groups.tolist()]
    # The same moves in every iteration: the same batch always gets the same order.
    rngs = [np.random.default_rng(one) for one in range(num_sets)]
    labels = [(segments.group[members], segments.element[members], segments.rank[members]) for members in set_actions]
    places = [np.zeros(len(members), np.int64) for members in set_actions]

    def search(num_rollouts: int) -> None:
        def search_one(one: int) -> None:
            of_set = labels[one], actions[one], states[one], places[one]
            search_set(num_rollouts, trees[one], rngs[one], segments.per_group, float(num_actions), *of_set)

        in_threads(search_one, num_sets)

    if seconds is None:
        search(rounds + 1)
    else:
        search(1)
        for _ in range(rounds):
            if perf_counter() - started >= seconds:
                break
            search(1)
    slot = np.zeros(num_actions, np.int64)
    for members, place in zip(set_actions, places, strict=True):
        slot[members] = place
    return slot


@njit(nogil=True)
def search_set(  # type: ignore[no-untyped-def]
    num_rollouts, tree, rng, per_group, spread, labels, actions, state, best_place
):
    """More rollouts of one set, none when all orders are scored; ``best_place`` takes its best order ``[actions]``.

    The place of its element in the proposed order is a segment's priority, then its rank in the group, which is below
    ``spread``. Groups come by the first of their elements. ``labels`` are group, element and rank (``ChunkSegments``).
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
        end_s, _ = list_schedule(actions, wish, state, turn)
        if learn(tree, end_s):
            best_place[:] = turn
        if tree.finished[ROOT]:
            break
