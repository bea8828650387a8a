"""Buckets of equal cost (arXiv:2603.25120, online microbatch scheduler): LPT with exchange, then the ILP by CP-SAT.

Minimise C_max with every item in one bucket, and the sums of encoder durations and of LLM durations of every bucket at
most C_max.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numba import njit
from ortools.sat.python import cp_model

from entrain_bench.arrays import FloatArray, IntArray

# Costs in the integer program, in parts of the largest sum at the start.
RESOLUTION = 1_000_000
# Share of the work that one integer program over a part of the buckets may take.
PROGRAM_SHARE = 0.02
# Programs in a row that improve nothing before the search ends.
PATIENCE = 16
# Share of the wall time after which everything should have ended: CP-SAT looks at the clock only now and then.
TIME_SHARE = 0.9
# This close to the trivial bound nothing is left to solve; a smaller gain is no gain.
CLOSE = 1e-6
# Sums that an exchange may look at: it ends after some 30 ms at the latest (x86-64, 2026-11), mostly by itself.
EXCHANGE_STEPS = 10_000_000


@dataclass(frozen=True, slots=True)
class SolverLimits:
    """What CP-SAT may take.

    Attributes:
        work: CP-SAT's deterministic time, which makes a solve that it ends repeat itself; 0: no solver.
        seconds: wall time, building the program included; None: no limit.
    """

    work: float
    seconds: float | None = None


def trivial_bound(cost: FloatArray, num_buckets: int) -> float:
    """No assignment has a C_max below the mean of a bucket or the largest item of either cost ``[items, 2]``."""
    if not len(cost):
        return 0.0
    return float(max(cost.sum(axis=0).max() / num_buckets, cost.max()))


def makespan(cost: FloatArray, bucket: IntArray, num_buckets: int) -> float:
    """C_max: the largest sum of either cost over a bucket."""
    return float(_highs(cost, bucket, num_buckets).max())


def balance(cost: FloatArray, num_buckets: int, limits: SolverLimits) -> IntArray:
    """Bucket of each item ``[items]``: by LPT with exchange, improved by CP-SAT within its limits.

    Args:
        cost: encoder and LLM duration of each item ``[items, 2]``.
        num_buckets: buckets.
        limits: of the solver.
    """
    start = lpt_with_exchange(cost, num_buckets)
    return improve(cost, num_buckets, start, limits) if limits.work else start


def longest_first(cost: FloatArray, num_buckets: int) -> IntArray:
    """LPT: items by falling max of their two costs, each to the bucket whose larger sum stays least."""
    return np.asarray(_place(_by_falling(cost), np.ascontiguousarray(cost, np.float64), num_buckets))


def lpt_with_exchange(cost: FloatArray, num_buckets: int) -> IntArray:
    """LPT, then exchanges between the fullest bucket and others for as long as one of them lowers it.

    The fullest bucket gives an item to another one, or swaps one with it, so that the fuller of the two is lowest;
    the emptiest bucket that helps is taken.
    """
    bucket = longest_first(cost, num_buckets)
    # The last item weighs nothing: swapping with it is giving.
    padded = np.concatenate([cost, np.zeros((1, 2))])
    enough = trivial_bound(cost, num_buckets) * (1 + CLOSE)
    return np.asarray(_exchange(padded, np.append(bucket, -1), num_buckets, enough, EXCHANGE_STEPS)[:-1])


def improve(cost: FloatArray, num_buckets: int, start: IntArray, limits: SolverLimits) -> IntArray:
    """Lower C_max of ``start`` by integer programs over the fullest bucket and a few others; deterministic.

    First with the least full one. After every second program that gives nothing one more bucket joins, chosen at
    random, up to the program over all buckets. Nothing ever gets worse.
    """
    deadline = np.inf if limits.seconds is None else perf_counter() + limits.seconds * TIME_SHARE
    bucket, work, misses = start.copy(), 0.0, 0
    bound = trivial_bound(cost, num_buckets) * (1 + CLOSE)
    rng = np.random.default_rng(0)
    while work < limits.work and misses < PATIENCE:
        high = _highs(cost, bucket, num_buckets)
        fullest, size = int(high.argmax()), min(2 + misses // 2, num_buckets)
        left = deadline - perf_counter()
        if left <= 0 or high[fullest] <= bound:
            break
        rest = np.delete(np.arange(num_buckets), fullest)
        others = rng.choice(rest, size - 1, replace=False) if misses else rest[[high[rest].argmin()]]
        group = np.sort(np.append(others, fullest))
        items = np.flatnonzero(np.isin(bucket, group))
        before = np.searchsorted(group, bucket[items])
        most = limits.work - work if size == num_buckets else limits.work * PROGRAM_SHARE
        after, spent = solve(cost[items], size, before, SolverLimits(most, left))
        work += spent
        if makespan(cost[items], after, size) < high[fullest] * (1 - CLOSE):
            bucket[items], misses = group[after], 0
        elif size == num_buckets:
            break
        else:
            misses += 1
    return bucket


def solve(cost: FloatArray, num_buckets: int, start: IntArray, limits: SolverLimits) -> tuple[IntArray, float]:
    """One integer program by CP-SAT, from ``start``.

    Buckets are interchangeable: the k-th item by falling cost may only go to the first k buckets.

    CP-SAT takes a program in, and its result is read, without a look at the clock, together in less time than building
    took (two thirds, x86-64, 2026-11). That long is kept for them: a program that takes half of the time to build is
    given up.

    Returns:
        The best assignment found, ``start`` if none, and the deterministic time taken.
    """
    started, limit_s = perf_counter(), np.inf if limits.seconds is None else limits.seconds

    def left_s() -> float:
        return limit_s - 2 * (perf_counter() - started)

    order = _by_falling(cost)
    hint = _first_seen(start[order])
    weight = np.rint(cost[order] * (RESOLUTION / makespan(cost, start, num_buckets)))
    most = int(makespan(weight, hint, num_buckets))
    model = cp_model.CpModel()
    largest = model.new_int_var(int(np.ceil(trivial_bound(weight, num_buckets))), most, "C_max")
    model.add_hint(largest, most)
    rows = []
    for item in range(len(order)):
        if left_s() <= 0:
            return start.copy(), 0.0
        row = [model.new_bool_var("") for _ in range(min(item + 1, num_buckets))]
        model.add_exactly_one(row)
        model.add_hint(row[hint[item]], True)
        rows.append(row)
    for bucket in range(min(num_buckets, len(order))):
        if left_s() <= 0:
            return start.copy(), 0.0
        literals = [row[bucket] for row in rows[bucket:]]
        for weights in weight[bucket:].T.astype(np.int64).tolist():
            model.add(cp_model.LinearExpr.weighted_sum(literals, weights) <= largest)
    model.minimize(largest)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = limits.work
    solver.parameters.max_time_in_seconds = max(0.0, left_s())
    # The program is as tight as presolve would make it, and its linear relaxation says no more than the trivial bound:
    # without both, the time goes into search.
    solver.parameters.cp_model_presolve = False
    solver.parameters.linearization_level = 0
    # It would leave the process without Python's handler: Ctrl-C could not clean up any more.
    solver.parameters.catch_sigint_signal = False
    found = start.copy()
    if solver.solve(model) in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        found[order] = [next(b for b, literal in enumerate(row) if solver.boolean_value(literal)) for row in rows]
    return found, float(solver.response_proto.deterministic_time)


def _highs(cost: FloatArray, bucket: IntArray, num_buckets: int) -> FloatArray:
    """The larger of the two sums of every bucket ``[buckets]``."""
    return np.maximum(*(np.bincount(bucket, weights=column, minlength=num_buckets) for column in cost.T))


def _by_falling(cost: FloatArray) -> IntArray:
    return np.argsort(-cost.max(axis=1), kind="stable")


def _first_seen(bucket: IntArray) -> IntArray:
    """The same partition with buckets numbered in the order in which they appear."""
    _, first, label = np.unique(bucket, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first, kind="stable"), kind="stable")[label]


@njit(cache=True)
def deal(order, group, cost, num_groups, num_bins):  # type: ignore[no-untyped-def]
    """Bin of each item: in the given order, the least-loaded bin of its group (LPT inside every group)."""
    load = np.zeros((num_groups, num_bins))
    chosen = np.empty(len(order), np.int64)
    for item in order:
        row = load[group[item]]
        best = np.argmin(row)
        chosen[item] = best
        row[best] += cost[item]
    return chosen


@njit(cache=True)
def _place(order, cost, num_buckets):  # type: ignore[no-untyped-def]
    load = np.zeros((num_buckets, 2))
    bucket = np.empty(len(order), np.int64)
    for item in order:
        best, best_high, best_sum = -1, np.inf, np.inf
        for b in range(num_buckets):
            high = max(load[b, 0] + cost[item, 0], load[b, 1] + cost[item, 1])
            if high < best_high or (high == best_high and load[b, 0] + load[b, 1] < best_sum):
                best, best_high, best_sum = b, high, load[b, 0] + load[b, 1]
        bucket[item] = best
        load[best] += cost[item]
    return bucket


@njit(cache=True)
def _exchange(cost, bucket, num_buckets, enough, most_steps):  # type: ignore[no-untyped-def]
    nothing = len(bucket) - 1
    load = np.zeros((num_buckets, 2))
    for item in range(nothing):
        load[bucket[item]] += cost[item]
    steps = 0
    while steps < most_steps:
        high = np.maximum(load[:, 0], load[:, 1])
        full = np.argmax(high)
        if high[full] <= enough:
            break
        given, mine = -1, np.flatnonzero(bucket == full)
        for other in np.argsort(high, kind="mergesort"):
            theirs = np.append(np.flatnonzero(bucket == other), nothing)
            steps += len(bucket) + len(mine) * len(theirs)
            given, taken = _best_swap(mine, theirs, load[full], load[other], cost, high[full] * (1 - CLOSE))
            if given >= 0:
                break
        if given < 0:
            break
        load[full] += cost[taken] - cost[given]
        load[other] += cost[given] - cost[taken]
        bucket[given] = other
        if taken != nothing:
            bucket[taken] = full
    return bucket


@njit(cache=True)
def _best_swap(mine, theirs, my_load, their_load, cost, below):  # type: ignore[no-untyped-def]
    """The items of two buckets whose exchange makes the fuller one lowest, below a bound; -1 if there are none."""
    best, given, taken = below, -1, -1
    for one in mine:
        for two in theirs:
            first, second = cost[one, 0] - cost[two, 0], cost[one, 1] - cost[two, 1]
            left = max(my_load[0] - first, my_load[1] - second)
            after = max(left, their_load[0] + first, their_load[1] + second)
            if after < best:
                best, given, taken = after, one, two
    return given, taken
