"""Both reorderings of DistTrain against brute force and hand-worked cases."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import sliding_window_view

from entrain_bench.base.arrays import FloatArray
from entrain_bench_strategies.disttrain.assigner import interval_order

# Inter-microbatch reordering


def first_stage_idle(forward: FloatArray, backward: FloatArray, prefix: list[int], number: int) -> float:
    """Time from the first stage's previous backward (or first forward) to the arrival of backward ``number``.

    Replays 1F1B from scratch over what the prefix determines, action by action.
    """
    stages = forward.shape[1]
    queues = []
    for stage in range(stages):
        warm = stages - 1 - stage
        queue = [("F", m) for m in range(warm)]
        for m in range(number + 1):
            queue += [("F", m + warm), ("B", m)]
        queues.append(queue)
    end: dict[tuple[str, int, int], float] = {}
    free = [0.0] * stages
    moved = True
    while moved:
        moved = False
        for stage, queue in enumerate(queues):
            while queue:
                kind, m = queue[0]
                if kind == "F" and m >= len(prefix):
                    break
                if kind == "F":
                    need = ("F", stage - 1, m) if stage else None
                    seconds = forward[prefix[m], stage]
                else:
                    need = ("B", stage + 1, m) if stage < stages - 1 else ("F", stage, m)
                    seconds = backward[prefix[m], stage]
                if need is not None and need not in end:
                    break
                begin = max(free[stage], end[need] if need else 0.0)
                free[stage] = end[kind, stage, m] = begin + seconds
                queue.pop(0)
                moved = True
    return end["B", 1, number] - end["B", 0, number - 1]


def least_miss(rising: FloatArray, number: int, target: float) -> float:
    """Distance from the target to the best sum of ``number`` neighbours with one of them swapped at most."""
    runs = sliding_window_view(rising, number).sum(axis=1) if number else np.zeros(1)
    first = int(np.abs(runs - target).argmin())
    swaps = np.delete(rising, slice(first, first + number)) - rising[first : first + number, None]
    return float(np.abs(runs[first] + np.append(swaps, 0.0) - target).min())


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 5), st.integers(1, 24), st.sampled_from([1.0, 3.0]))
def test_every_pick_fits_its_interval_best(seed: int, stages: int, count: int, first: float) -> None:
    rng = np.random.default_rng(seed)
    forward, backward = rng.uniform(0.1, 5, (count, stages)), rng.uniform(0.1, 9, (count, stages))
    # With a slow first stage, its forwards of the warm-up hold backwards up.
    forward[:, 0] *= first
    order = interval_order(forward, backward)
    assert sorted(order) == list(range(count))
    rising = np.argsort(forward.sum(axis=1))
    rear = min(stages - 1, count - 1)
    assert order[0] == rising[0]
    assert order[count - rear :].tolist() == rising[1 : 1 + rear].tolist()
    middle = count - rear
    interval, number = forward[order[0], 1:].sum() + backward[order[0], 1:].sum(), min(stages, middle) - 1
    miss = abs(forward[order[1 : 1 + number], 0].sum() - interval)
    assert miss == pytest.approx(least_miss(np.sort(forward[order[1:middle], 0]), number, interval))
    for at in range(stages, middle):
        idle = first_stage_idle(forward, backward, order[:at].tolist(), at - stages + 1)
        left = order[at:middle]
        misses = np.abs(forward[left, 0] - idle)
        assert misses[0] == pytest.approx(misses.min())


def test_interval_filling_by_hand() -> None:
    # Two stages, backward twice the forward. Microbatches by first-stage forward: 1, 2, 3, 4, 6; stage 1 takes 1 each.
    forward = np.array([[4.0, 1], [1, 1], [6, 1], [2, 1], [3, 1]])
    backward = 2 * forward
    # First: the smallest (1). Rear: the next smallest (2). Interval 1: stage 1 forward 1 and backward 2 = 3 -> the 3.
    # Stage 0: F 0-1, F 1-4, B(1) arrives at 4, 4-6. Stage 1: B(1) 2-4, F(3) 4-5, B(3) 5-7 -> idle 7 - 6 = 1 -> the 4.
    # Then the 6 alone is left.
    assert interval_order(forward, backward).tolist() == [1, 4, 0, 2, 3]
    # B(3) 5-11 -> idle 11 - 6 = 5, between the 4 and the 6 -> the smaller.
    backward[4, 1] = 6.0
    assert interval_order(forward, backward).tolist() == [1, 4, 0, 2, 3]
    forward[0, 0] = 3.9
    assert interval_order(forward, backward).tolist() == [1, 4, 2, 0, 3]
