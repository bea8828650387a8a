"""What is measured of a setting; every function returns numbers by name, with units in the names."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from hydra.utils import get_method

from entrain_bench.base.arrays import FloatArray, IntArray
from entrain_bench.program import Pass, Program
from entrain_bench.program.layout import Layout
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import Setting, prepare
from entrain_bench.simulate import Simulator, place_actions
from entrain_bench.specs.shapes import SampleShapes

REPEATS, WARM_UPS = 20, 2
LONG_S = 30.0


def wall_times_s(call: Callable[[int], Any], repeats: int = REPEATS) -> list[float]:
    """Wall times of calls after those that warm up; fewer, but at least three, once they have taken long.

    Args:
        call: is given the number of its call, for an input of its own.
        repeats: how many are timed.
    """
    times: list[float] = []
    for index in range(WARM_UPS + repeats):
        started = perf_counter()
        call(index)
        times.append(perf_counter() - started)
        if len(times) >= WARM_UPS + 3 and sum(times) > LONG_S:
            break
    return times[WARM_UPS:]


def median_s(call: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Median wall time of a call."""
    return median(wall_times_s(lambda _: call(), repeats))


def _setting(overrides: Sequence[str]) -> tuple[Setting, Layout]:
    setting = prepare(compose_cells(overrides)[0].config)
    return setting, setting.strategy.plan(setting.profile)


def _simulator(setting: Setting) -> Simulator:
    return Simulator(setting.truth, setting.job.memory_budget_bytes)


def simulated_iteration(overrides: Sequence[str], repeats: int = REPEATS) -> dict[str, float]:
    """Schedule and execute (validate, price, place) one iteration, given its assignment."""
    setting, layout = _setting(overrides)
    (shapes,) = _batches(setting, 1)
    assignment = setting.strategy.assigner.assign(shapes, layout, setting.profile)

    def schedule() -> Program:
        return setting.strategy.scheduler.schedule(shapes, layout, assignment, setting.profile)

    program = schedule()
    scheduled = median_s(schedule, repeats)
    executed = median_s(lambda: _simulator(setting).execute(program), repeats)
    return {
        "schedule_s": scheduled,
        "execute_s": executed,
        "iteration_s": scheduled + executed,
        "num_actions": program.num_actions,
        "peak_rss_gb": _peak_rss_gb(),
    }


def _peak_rss_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def assignment(overrides: Sequence[str], repeats: int = REPEATS) -> dict[str, float]:
    """The assigner alone, over different batches, beside the simulated iteration that it has to hide behind."""
    setting, layout = _setting(overrides)
    strategy, profile = setting.strategy, setting.profile
    batches = _batches(setting, WARM_UPS + repeats)
    times = wall_times_s(lambda index: strategy.assigner.assign(batches[index], layout, profile), repeats)
    timeline = _simulator(setting).execute(strategy.program(batches[0], layout, profile))
    return {"assign_s": median(times), "iteration_time_s": timeline.iteration_time_s}


def every_part(overrides: Sequence[str], repeats: int = REPEATS) -> dict[str, float]:
    """Planning, once, and every part of an iteration: assignment, schedule, execution with memory."""
    setting = prepare(compose_cells(overrides)[0].config)
    started = perf_counter()
    layout = setting.strategy.plan(setting.profile)
    plan_s = perf_counter() - started
    strategy, profile = setting.strategy, setting.profile.under(layout)
    (shapes,) = _batches(setting, 1)
    assigned = strategy.assigner.assign(shapes, layout, profile)
    program = strategy.scheduler.schedule(shapes, layout, assigned, profile)
    return {
        "plan_s": plan_s,
        "assign_s": median_s(lambda: strategy.assigner.assign(shapes, layout, profile), repeats),
        "schedule_s": median_s(lambda: strategy.scheduler.schedule(shapes, layout, assigned, profile), repeats),
        "execute_s": median_s(lambda: _simulator(setting).execute(program), repeats),
        "iteration_time_s": _simulator(setting).execute(program).iteration_time_s,
        "peak_rss_gb": _peak_rss_gb(),
    }


def assignment_within_limit(overrides: Sequence[str], limit: str, limit_s: float, repeats: int = 5) -> dict[str, float]:
    """The longest of several assignments by a solver that must end by itself.

    Args:
        overrides: the setting.
        limit: the key that limits the solver, seconds.
        limit_s: its value.
        repeats: how many batches.
    """
    setting, layout = _setting([*overrides, f"{limit}={limit_s}"])
    batches = _batches(setting, WARM_UPS + repeats)
    times = wall_times_s(
        lambda index: setting.strategy.assigner.assign(batches[index], layout, setting.profile), repeats
    )
    return {**_sizes(setting, layout), "limit_s": limit_s, "assign_s": max(times), "share": max(times) / limit_s}


def bucket_filling(overrides: Sequence[str], target: str, repeats: int = REPEATS) -> dict[str, float]:
    """A function that fills buckets, on the profile's estimates of different batches.

    Args:
        overrides: the setting; encoder and LLM have one DP.
        target: the function, by name: costs ``[samples, 2]`` and number of buckets to buckets ``[samples]``.
        repeats: how many batches.
    """
    setting, layout = _setting(overrides)
    fill: Callable[[FloatArray, int], IntArray] = get_method(target)
    encoder, llm = layout.modules[0], layout.modules[-1]
    # A pipeline's clock is its stage: what one stage has to do with a sample.
    costs = [
        np.stack(setting.profile.estimate_samples(shapes, llm.tp, llm.cp), axis=1) / [encoder.pp, llm.pp]
        for shapes in _batches(setting, WARM_UPS + repeats)
    ]
    sizes = _sizes(setting, layout)
    num_buckets = sizes["num_buckets"]
    times = wall_times_s(lambda index: fill(costs[index], num_buckets), repeats)
    gaps = [bucket_gap(cost, fill(cost, num_buckets), num_buckets) for cost in costs]
    return {**sizes, "fill_s": median(times), "worst_gap": max(gaps)}


def bucket_gap(cost: FloatArray, bucket: IntArray, num_buckets: int) -> float:
    """Relative excess of the fullest bucket, by either cost ``[samples, 2]``, over the trivial bound.

    No bucket can be less than the mean of all or the largest sample.
    """
    fullest = max(float(np.bincount(bucket, weights=column).max()) for column in cost.T)
    return fullest / max(float(cost.max()), float(cost.sum(axis=0).max()) / num_buckets) - 1.0


def _batches(setting: Setting, count: int) -> list[SampleShapes]:
    return [setting.source.batch(index, setting.job.global_batch, 0) for index in range(count)]


def _sizes(setting: Setting, layout: Layout) -> dict[str, int]:
    num_buckets = layout.num_microbatches * layout.modules[-1].dp
    return {"num_samples": setting.job.global_batch, "num_buckets": num_buckets}


def against_torch(overrides: Sequence[str]) -> dict[str, float]:
    """Our placement and torch's private schedule simulator on one 1F1B; torch's sends and receives count as actions."""
    from torch.distributed.pipelining import schedules as torch_schedules

    setting, layout = _setting(overrides)
    (shapes,) = _batches(setting, 1)
    program = setting.strategy.program(shapes, layout, setting.profile)
    prices = setting.truth.price(program)
    ours = median_s(lambda: place_actions(program, prices.duration_s, prices.delay_s))
    kinds = {Pass.FORWARD: torch_schedules.F, Pass.BACKWARD: torch_schedules.FULL_BACKWARD}
    # torch knows no modules: its stage is our lane.
    orders = {
        lane: [
            torch_schedules._Action(lane, kinds[action.kind], action.microbatch)
            for action in program.lane(lane)
            if action.kind in kinds
        ]
        for lane in range(layout.num_lanes)
    }
    num_actions = sum(map(len, orders.values()))
    order = torch_schedules._add_send_recv(orders, lambda stage: stage, layout.num_lanes)
    theirs = median_s(
        lambda: torch_schedules._simulate_comms_compute(order, lambda stage: stage, layout.num_lanes), repeats=5
    )
    torch_actions = sum(map(len, order.values()))
    return {
        "num_actions": num_actions,
        "actions_per_s": num_actions / ours,
        "torch_actions_per_s": torch_actions / theirs,
        "ratio": (num_actions / ours) / (torch_actions / theirs),
    }


def against_megatron(overrides: Sequence[str], repeats: int = REPEATS) -> dict[str, float]:
    """Iterations of our training runtime and of megatron-core's 1F1B, taking turns on two ranks of this machine."""
    from entrain_bench.lab.bench.ranks import on_ranks
    from entrain_bench.lab.bench.training import NUM_RANKS, take_turns

    first, last = on_ranks(take_turns, NUM_RANKS, overrides, repeats)
    return _with_ratios(first | last)


def boundary_against_bridge(encoder_dp: int, llm_dp: int, repeats: int = REPEATS) -> dict[str, float]:
    """Tensors between an encoder and an LLM by our messages and by megatron-core's ``BridgeCommunicator``, in turn.

    Args:
        encoder_dp: replicas of the encoder, of one rank each.
        llm_dp: replicas of the LLM.
        repeats: how many iterations of each are timed.
    """
    from entrain_bench.lab.bench.bridge import compare_boundary
    from entrain_bench.lab.bench.ranks import on_ranks

    by_rank = on_ranks(compare_boundary, encoder_dp + llm_dp, encoder_dp, llm_dp, repeats)
    differences = max(found["different_tensors"] for found in by_rank)
    return _with_ratios(by_rank[0] | {"different_tensors": differences})


def _with_ratios(found: dict[str, float]) -> dict[str, float]:
    return {
        **found,
        "ratio": found["ours_s"] / found["megatron_s"],
        "shortest_ratio": found["ours_shortest_s"] / found["megatron_shortest_s"],
    }
