"""Loops whose collator pads a microbatch: seconds of its ranks, and the microbatches that take them least long."""

from collections.abc import Sequence

import numpy as np

from entrain_bench.base.arrays import FloatArray

# Collators put samples of different lengths one behind another, or fill up all to the longest.
NONE = "none"
LONGEST = "longest"
PADDINGS = (NONE, LONGEST)
BISECTIONS = 40

# Microbatches of a global batch: of every rank, the positions of each microbatch's samples, in order.
type Dealt = tuple[tuple[tuple[int, ...], ...], ...]


def seconds_of(rows: Sequence[Sequence[int]], encoder_s: FloatArray, llm_s: FloatArray, padding: str) -> float:
    """Estimated seconds of microbatches, from those of each sample alone; items are not padded."""
    total = 0.0
    for row in rows:
        chosen = [*row]
        llm = len(chosen) * float(llm_s[chosen].max()) if padding == LONGEST else float(llm_s[chosen].sum())
        total += float(encoder_s[chosen].sum()) + llm
    return total


def deal_padded(encoder_s: FloatArray, llm_s: FloatArray, num_ranks: int, num_microbatches: int) -> Dealt:
    """Microbatches of samples of like length that take equally long, the same number on every rank.

    The longest microbatch is as short as consecutive samples in order of length allow (bisection).
    """
    order = np.argsort(-llm_s, kind="stable").tolist()
    wanted = num_ranks * num_microbatches
    low = 0.0
    high = float(encoder_s.sum()) + len(order) * float(llm_s.max())
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if len(_cut(order, encoder_s, llm_s, middle)) <= wanted:
            high = middle
        else:
            low = middle
    rows = _cut(order, encoder_s, llm_s, high)

    def cost(row: Sequence[int]) -> float:
        return seconds_of([row], encoder_s, llm_s, LONGEST)

    while len(rows) < wanted:
        place = max((index for index, row in enumerate(rows) if len(row) > 1), key=lambda index: cost(rows[index]))
        row = rows[place]
        rows[place : place + 1] = [row[: len(row) // 2], row[len(row) // 2 :]]
    of_rank: list[list[tuple[int, ...]]] = [[] for _ in range(num_ranks)]
    load = [0.0] * num_ranks
    for row in sorted(rows, key=cost, reverse=True):
        free = (rank for rank in range(num_ranks) if len(of_rank[rank]) < num_microbatches)
        rank = min(free, key=load.__getitem__)
        load[rank] += cost(row)
        of_rank[rank].append(tuple(sorted(row)))
    return tuple(map(tuple, of_rank))


def _cut(order: Sequence[int], encoder_s: FloatArray, llm_s: FloatArray, most_s: float) -> list[list[int]]:
    """Consecutive samples in groups of at most ``most_s``, or of one sample; the first of a group is its longest."""
    rows: list[list[int]] = []
    encoder = 0.0
    longest = 0.0
    for sample in order:
        encoder += float(encoder_s[sample])
        if rows and encoder + (len(rows[-1]) + 1) * longest <= most_s:
            rows[-1].append(sample)
        else:
            rows.append([sample])
            encoder = float(encoder_s[sample])
            longest = float(llm_s[sample])
    return rows
