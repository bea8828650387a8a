"""Buckets of equal cost (arXiv:2603.25120, online microbatch scheduler): LPT with exchange, then the ILP by CP-SAT.

Minimise C_max with every item in one bucket, and the sums of encoder durations and of LLM durations of every bucket at
most C_max.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import numpy as np
from ortools.sat.python import cp_model

from entrain_bench.balancing.filling import CLOSE, by_falling, lpt_with_exchange, trivial_bound
from entrain_bench.balancing.groups import members_of
from entrain_bench.base.arrays import FloatArray, IntArray

# Costs in the integer program, in parts of the largest sum at the start.
RESOLUTION = 1_000_000
# Share of the work that one integer program over a part of the buckets may take.
PROGRAM_SHARE = 0.02
# Programs in a row that improve nothing before the search ends.
PATIENCE = 16
# Share of the wall time after which everything should have ended: CP-SAT looks at the clock only now and then.
TIME_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class SolverLimits:
    """What CP-SAT may take.

    Attributes:
        work: CP-SAT's deterministic time, which makes a solve that it ends repeat itself; 0: no solver.
        seconds: wall time, building the program included; None: no limit.
    """

    work: float
    seconds: float | None = None


def makespan(cost: FloatArray, bucket: IntArray, num_buckets: int) -> float:
    """C_max: the largest sum of either cost over a bucket."""
    return float(_highs(cost, bucket, num_buckets).max())


def balance(cost: FloatArray, num_buckets: int, limits: SolverLimits) -> IntArray:
    """Bucket of each item, by its encoder and LLM duration ``[items, 2]``: LPT with exchange, then CP-SAT."""
    start = lpt_with_exchange(cost, num_buckets)
    return improve(cost, num_buckets, start, limits) if limits.work else start


def improve(cost: FloatArray, num_buckets: int, start: IntArray, limits: SolverLimits) -> IntArray:
    """Lower C_max of ``start`` by integer programs over the fullest bucket and a few others; deterministic.

    First with the least full one. After every second program that gives nothing one more bucket joins, chosen at
    random, up to the program over all buckets. Nothing ever gets worse.
    """
    deadline = np.inf if limits.seconds is None else perf_counter() + limits.seconds * TIME_SHARE
    bucket, work, misses = start.copy(), 0.0, 0
    bound = trivial_bound(cost, num_buckets) * (1 + CLOSE)
    high, members = _highs(cost, bucket, num_buckets), members_of(bucket, num_buckets)
    rng = np.random.default_rng(0)
    while work < limits.work and misses < PATIENCE:
        fullest, size = int(high.argmax()), min(2 + misses // 2, num_buckets)
        left = deadline - perf_counter()
        if left <= 0 or high[fullest] <= bound:
            break
        emptiest = np.where(np.arange(num_buckets) == fullest, np.inf, high).argmin()
        others = _others(fullest, num_buckets, size - 1, rng) if misses else np.array([emptiest])
        group = np.sort(np.append(others, fullest))
        items = np.sort(np.concatenate([members[one] for one in group]))
        before = np.searchsorted(group, bucket[items])
        most = limits.work - work if size == num_buckets else limits.work * PROGRAM_SHARE
        after, spent = solve(cost[items], size, before, SolverLimits(most, left))
        work += spent
        if makespan(cost[items], after, size) < high[fullest] * (1 - CLOSE):
            bucket[items], misses = group[after], 0
            high[group] = _highs(cost[items], after, size)
            for place, one in enumerate(group):
                members[one] = items[after == place]
        elif size == num_buckets:
            break
        else:
            misses += 1
    return bucket


def _others(fullest: int, num_buckets: int, count: int, rng: np.random.Generator) -> IntArray:
    """Different buckets beside the fullest, drawn at random ``[count]``."""
    drawn = rng.choice(num_buckets - 1, count, replace=False)
    return np.asarray(drawn + (drawn >= fullest))


class _Model(cp_model.CpModel):
    """A program without the old names of its methods, which take longer to make than a program of a few items."""

    def _add_pre_pep8_methods(self) -> None:
        pass


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

    order = by_falling(cost)
    hint = _first_seen(start[order])
    weight = np.rint(cost[order] * (RESOLUTION / makespan(cost, start, num_buckets)))
    most = int(makespan(weight, hint, num_buckets))
    model = _Model()
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


def _first_seen(bucket: IntArray) -> IntArray:
    """The same partition with buckets numbered in the order in which they appear."""
    _, first, label = np.unique(bucket, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first, kind="stable"), kind="stable")[label]
