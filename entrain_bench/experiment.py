"""The experiment, start to end: workload, plan, assign, schedule, execute, measure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol, runtime_checkable

import numpy as np

from entrain_bench.config.instantiate import instantiate
from entrain_bench.config.schema import RunConfig
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program import Program
from entrain_bench.program.layout import check_layout
from entrain_bench.program.table import timeline_frame
from entrain_bench.program.timeline import Timeline
from entrain_bench.records.metrics import measure
from entrain_bench.records.outcome import Outcome
from entrain_bench.specs.cluster import ClusterSpec
from entrain_bench.specs.job import Job
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.workload import ShapeSource, Workload
from entrain_bench.strategy.interface import Strategy
from entrain_bench.strategy.profile import Profile

# Timelines of larger programs are not kept: they would take longer to write than to simulate.
MAX_KEPT_ACTIONS = 200_000


class Executor(Protocol):
    """Runs programs and reports timelines."""

    def execute(self, program: Program) -> Timeline:
        """Validate and run one iteration's program."""
        ...


@runtime_checkable
class Launcher(Protocol):
    """A harness that runs the whole experiment elsewhere: on ranks of its own."""

    def launch(self, config: RunConfig, progress: Callable[[int], None]) -> Outcome:
        """Run all iterations; ``progress`` is called with the number of finished ones."""
        ...


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything a run needs, built from its configuration."""

    job: Job
    truth: CostTruth
    source: ShapeSource
    strategy: Strategy
    executor: Executor | Launcher
    profile: Profile


def prepare(config: RunConfig) -> Setting:
    """Build the objects a configuration describes.

    Raises:
        UserError: naming what is wrong in the configuration or the data.
    """
    model, cluster = ModelSpec.from_config(config.model), ClusterSpec.from_config(config.cluster)
    budget = cluster.device.memory_bytes * config.memory_fraction
    job = Job(
        model,
        cluster,
        config.global_batch,
        config.microbatch_size,
        config.layout,
        budget,
        config.distributed_optimizer,
    )
    truth = CostTruth(model, cluster, config.distributed_optimizer)
    parts: dict[str, Any] = {
        part: instantiate(config.strategy[part], f"strategy.{part}", method)
        for part, method in (("planner", "plan"), ("assigner", "assign"), ("scheduler", "schedule"))
    }
    executor = instantiate(config.harness, "harness", ("execute", "launch"), truth=truth, memory_budget_bytes=budget)
    workload: Workload = instantiate(config.workload, "workload", "source")
    source = workload.source(model.tokens)
    profile = Profile(job, source, config.seed, config.belief_error, config.belief_bias)
    return Setting(job, truth, source, Strategy(str(config.strategy["name"]), **parts), executor, profile)


def run_experiment(config: RunConfig, progress: Callable[[int], None] = lambda _: None) -> Outcome:
    """Plan once, then assign, schedule, execute and measure every iteration.

    Args:
        config: the run.
        progress: called with the number of finished iterations.
    """
    setting = prepare(config)
    if isinstance(setting.executor, Launcher):
        return setting.executor.launch(config, progress)
    job, strategy, profile = setting.job, setting.strategy, setting.profile
    job.model.check_shapes(setting.source.batch(0, job.global_batch, config.seed))
    started = perf_counter()
    layout = strategy.plan(profile)
    planning_time_s = perf_counter() - started
    check_layout(layout, job.model, job.cluster)
    # Once unmeasured: the first call compiles what later ones only run.
    strategy.compose(profile.draw(job.global_batch), layout, profile)
    measured, frame = [], None
    # An iteration is assigned while the one before it runs, so what is known is the one before that.
    running: Timeline | None = None
    finished: Timeline | None = None
    for iteration in range(config.iterations):
        shapes = setting.source.batch(iteration, job.global_batch, config.seed)
        job.model.check_shapes(shapes)
        started = perf_counter()
        if finished:
            strategy = strategy.observe(finished, profile)
        program = strategy.compose(shapes, layout, profile)
        assignment_time_s = perf_counter() - started
        timeline = setting.executor.execute(program)
        finished, running = running, timeline
        measured.append(measure(timeline, setting.truth, assignment_time_s))
        if iteration == 0 and program.num_actions <= MAX_KEPT_ACTIONS:
            frame = timeline_frame(timeline)
        progress(iteration + 1)
    metrics = {name: float(np.mean([row[name] for row in measured])) for name in measured[0]}
    return Outcome(layout, {**metrics, "planning_time_s": planning_time_s}, tuple(measured), frame)
