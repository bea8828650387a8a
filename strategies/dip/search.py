"""Monte-Carlo tree search over orders: UCT (Kocsis and Szepesvari, ECML 2006) for one player and exact scores.

A node is the beginning of an order, a move puts one of the remaining elements next, a rollout completes the order and
scores it. Scores do not vary, so a node counts as good as its best rollout, and finished subtrees are left alone: given
enough rollouts the search has seen every order. Rollouts stay near the best order so far (MOVED), and nodes widen
slowly (as in Coulom, CG 2006), for a few dozen rollouts must do for dozens of elements.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from entrain_bench.arithmetic import log
from entrain_bench.arrays import IntArray

# Weight of exploration for scores scaled to [0, 1].
EXPLORATION = 0.2
# Elements that a rollout takes out of the best order and puts elsewhere, on average.
MOVED = 8.0


@dataclass(slots=True)
class _Node:
    """What was found below the beginning of an order."""

    children: dict[int, _Node] = field(default_factory=dict)
    visits: int = 0
    best: float = np.inf
    finished: bool = False


class OrderTree:
    """Searches the order of ``num_elements`` with the least score, one proposal at a time.

    The first proposal is the order 0, 1, 2, ...

    Attributes:
        order: the best order so far ``[elements]``.
        score: its score; infinite before the first.
    """

    def __init__(self, num_elements: int, rng: np.random.Generator) -> None:
        self.order: IntArray = np.arange(num_elements)
        self.score = np.inf
        self._worst = -np.inf
        self._rng = rng
        self._root = _Node(finished=num_elements == 0)
        self._path = [self._root]
        self._proposed: IntArray = self.order

    @property
    def finished(self) -> bool:
        """Whether every order was scored."""
        return self._root.finished

    def propose(self) -> IntArray:
        """The order to score next ``[elements]``; the best one again once all are."""
        node = self._root
        self._path, self._proposed = [node], self.order
        if self.finished or not node.visits:
            return self._proposed
        rest = self.order.tolist()
        begun: list[int] = []
        while node.visits:
            move = self._select(node, rest)
            rest.remove(move)
            begun.append(move)
            node = node.children.setdefault(move, _Node())
            self._path.append(node)
        self._proposed = np.array(begun + self._complete(rest), np.int64)
        return self._proposed

    def learn(self, score: float) -> bool:
        """Take the score of the last proposal; returns whether it is the best so far."""
        better = score < self.score
        if better:
            self.order, self.score = self._proposed, score
        self._worst = max(self._worst, score)
        for depth, node in reversed([*enumerate(self._path)]):
            node.visits += 1
            node.best = min(node.best, score)
            left = len(self.order) - depth
            node.finished = left <= 1 or (
                len(node.children) == left and all(child.finished for child in node.children.values())
            )
        return better

    def _select(self, node: _Node, rest: list[int]) -> int:
        """The unfinished child of the highest upper confidence bound, or a new one when the node is due for it."""
        children = {move: child for move, child in node.children.items() if not child.finished}
        fresh = [move for move in rest if move not in node.children]
        if fresh and (not children or len(node.children) < np.sqrt(node.visits + 1)):
            # What comes next in the best order is tried before all others.
            return fresh[0] if not node.children else fresh[self._rng.integers(len(fresh))]
        span = max(self._worst - self.score, np.finfo(float).tiny)
        spread = EXPLORATION * np.sqrt(log(node.visits))
        return max(
            children,
            key=lambda m: (self._worst - children[m].best) / span + spread / np.sqrt(children[m].visits),
        )

    def _complete(self, rest: list[int]) -> list[int]:
        """The rest in the best order, but for some elements that are put elsewhere."""
        for _ in range(self._rng.poisson(MOVED) if len(rest) > 1 else 0):
            element = rest.pop(self._rng.integers(len(rest)))
            rest.insert(self._rng.integers(len(rest) + 1), element)
        return rest
