"""The experiment, start to end: workload, plan, assign, schedule, execute, measure."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any, ClassVar, Literal, Protocol

import numpy as np

from entrain_bench.balancing.chunk_estimates import packed_iteration_s
from entrain_bench.balancing.interface import Strategy
from entrain_bench.balancing.profile import Profile, create_profile
from entrain_bench.balancing.variants import free_options
from entrain_bench.base.errors import ExecutionError, OutOfMemoryError, UserError, require
from entrain_bench.base.hosttime import HostTime, stopwatch
from entrain_bench.base.remembered import remembered
from entrain_bench.config.constants import speed_of
from entrain_bench.config.schema import FAIL, RunConfig
from entrain_bench.config.targets import instantiate
from entrain_bench.costs.bound import Need, find_need
from entrain_bench.costs.profiled.times import ProfiledDevice, cluster_with_times
from entrain_bench.costs.truth import ActionNoise, CostTruth, SlowRank
from entrain_bench.program import Program
from entrain_bench.program.layout import Layout, check_layout
from entrain_bench.program.table import timeline_frame
from entrain_bench.program.timeline import Timeline
from entrain_bench.records.keys import plan_key, workload_of
from entrain_bench.records.metrics import BELIEVED, FAILED, Metric, RunResult, check_results, measure
from entrain_bench.records.sealed import CachedLayout, CachedLayouts
from entrain_bench.specs.framework import with_options
from entrain_bench.specs.job import Job
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.specs.workload import ShapeSource, Workload, counts_of

# Timelines of larger programs are not kept: they would take longer to write than to simulate.
MAX_KEPT_ACTIONS = 200_000
# Jobs that a process remembers: the last ones, for sweeps run the cells of a job one after the other.
MAX_JOBS = 2
MAX_BATCHES = 8
# Keys of a configuration that are a strategy's, or say how a run is executed; the last three only planning sees.
OWN = {
    "strategy",
    "harness",
    "iterations",
    "on_oom",
    "belief_error",
    "belief_bias",
    "tuning",
    "tuning_budget",
    "tuning_options",
    "planning_seed",
}


class Watcher(Protocol):
    """Is told of finished iterations, and where they are measured on the way, of their values."""

    def __call__(self, done: int, values: Mapping[str, float] | None = None, /) -> None:
        """Take the number of finished iterations, and the last one's values by name."""


def unwatched(done: int, values: Mapping[str, float] | None = None, /) -> None:
    """Watch nothing."""


class Executor(Protocol):
    """Runs programs and reports timelines."""

    trains: ClassVar[Literal[False]]

    def execute(self, program: Program) -> Timeline:
        """Validate and run one iteration's program."""
        ...


class Trainer(Protocol):
    """Runs whole experiments, on ranks of its own."""

    trains: ClassVar[Literal[True]]

    def train(self, config: RunConfig, progress: Watcher) -> RunResult:
        """Run all iterations, telling ``progress`` of each."""
        ...


@dataclass(frozen=True, slots=True)
class SharedJob:
    """A job, its cost model, its source of samples, and its samples."""

    job: Job
    truth: CostTruth
    workload: Workload
    source: ShapeSource
    _batches: dict[tuple[int, int], SampleShapes] = field(default_factory=dict, repr=False, compare=False)
    _needs: dict[tuple[int, int], Need] = field(default_factory=dict, repr=False, compare=False)

    def batch(self, iteration: int, seed: int) -> SampleShapes:
        """The samples of an iteration; ``UserError`` for one that the model cannot take."""

        def drawn() -> SampleShapes:
            shapes = self.source.batch(iteration, self.job.global_batch, seed)
            self.job.model.check_shapes(shapes)
            return shapes

        return remembered(self._batches, (iteration, seed), drawn, MAX_BATCHES)

    def need(self, iteration: int, seed: int) -> Need:
        """Return the GPU time and lower bound of an iteration's samples under any layout."""
        made = partial(find_need, self.truth, self.batch(iteration, seed))
        return remembered(self._needs, (iteration, seed), made, MAX_BATCHES)


@dataclass(frozen=True, slots=True)
class RunContext:
    """Everything a run needs; ``planning`` is the planner's profile, the same at every seed of a job."""

    shared: SharedJob
    job: Job
    truth: CostTruth
    workload: Workload
    source: ShapeSource
    strategy: Strategy
    executor: Executor | Trainer
    profile: Profile
    planning: Profile

    def plan(self) -> Layout:
        """The strategy's layout; ``UserError`` if none meets the request, fits the layers or fits memory."""
        return self.strategy.plan(self.planning)


def prepare(config: RunConfig, source: ShapeSource | None = None) -> RunContext:
    """Build the objects of a run, maybe with other samples (``source``); ``UserError`` names a bad field."""
    shared = shared_job(config, source)
    truth = shared.truth
    budget = shared.job.memory_budget_bytes
    parts: dict[str, Any] = {
        part: instantiate(config.strategy[part], f"strategy.{part}", method)
        for part, method in (("planner", "plan"), ("assigner", "assign"), ("scheduler", "schedule"))
    }
    executor = instantiate(config.harness, "harness", ("execute", "train"), truth=truth, memory_budget_bytes=budget)
    if executor.trains:
        require(not config.action_noise, "action_noise", config.action_noise, "0 with harness=train")
        require(config.slow_rank is None, "slow_rank", config.slow_rank, "null with harness=train")
        require(config.on_oom == FAIL, "on_oom", config.on_oom, f"{FAIL} with harness=train")
    known = shared.job, truth.beyond, shared.source
    wrong = config.belief_error, config.belief_bias
    profile = create_profile(*known, config.seed, *wrong)
    planning = create_profile(*known, config.planning_seed, *wrong, config.simulated_batches)
    options = free_options(config.strategy.get("options", {}), parts) if config.tunes_options else ()
    strategy = Strategy(
        str(config.strategy["name"]), **parts, options=tuple(options), free_sharding=config.tunes_options
    )
    known_job = shared.job, truth, shared.workload, shared.source
    return RunContext(shared, *known_job, strategy, executor, profile, planning)


_jobs: dict[str, SharedJob] = {}


def shared_job(config: RunConfig, source: ShapeSource | None = None) -> SharedJob:
    """The job of a run; arguments and errors as for ``prepare``."""
    if source is not None:
        return _made(config, source)
    content = {name: value for name, value in config.content().items() if name not in OWN}
    device = ProfiledDevice.of(config.cluster)
    data = [workload_of(config).fingerprint(), *([device.fingerprint()] if device else [])]
    key = json.dumps([content, data, asdict(speed_of(config))], sort_keys=True)
    return remembered(_jobs, key, partial(_made, config, None), MAX_JOBS)


def _made(config: RunConfig, source: ShapeSource | None) -> SharedJob:
    model = ModelSpec.from_config(config.model)
    cluster, measured = cluster_with_times(config.cluster, model, config.framework, speed_of(config))
    job = Job(
        model,
        cluster,
        config.global_batch,
        1 if config.microbatch_size is None else config.microbatch_size,
        config.layout,
        cluster.device.memory_bytes * config.memory_fraction,
        config.framework,
        free_microbatch_size=config.microbatch_size is None,
    )
    model = with_options(model, config.framework)
    job = replace(job, model=model)
    slow = None
    if config.slow_rank is not None:
        allowed = f"null or in 0..{cluster.num_ranks - 1}"
        require(0 <= config.slow_rank < cluster.num_ranks, "slow_rank", config.slow_rank, allowed)
        slow = SlowRank(config.slow_rank, config.slow_rank_factor)
    truth = CostTruth(model, cluster, config.framework, ActionNoise(config.action_noise, config.seed), measured, slow)
    workload: Workload = instantiate(config.workload, "workload", "source")
    return SharedJob(job, truth, workload, workload.source(model.tokens) if source is None else source)


@dataclass(slots=True)
class Feed:
    """Makes the programs of a run by its strategy, which may learn from executed iterations."""

    setting: RunContext
    layout: Layout
    seed: int
    strategy: Strategy = field(init=False)
    _executed: Timeline | None = None

    def __post_init__(self) -> None:
        self.strategy = self.setting.strategy

    def batch(self, iteration: int) -> SampleShapes:
        """The samples of an iteration; ``UserError`` for one that the model cannot take."""
        return self.setting.shared.batch(iteration, self.seed)

    def program(self, shapes: SampleShapes) -> tuple[Program, HostTime]:
        """The program of a batch, and the time that observing, assigning and scheduling took."""
        profile = self.setting.profile
        with stopwatch() as host_time:
            if self._executed is not None:
                self.strategy = self.strategy.observe(self._executed, profile)
                self._executed = None
            program = self.strategy.program(shapes, self.layout, profile)
        return program, host_time

    def believed_s(self, program: Program) -> float:
        """Iteration time of a program by the estimates of the run's profile, in seconds."""
        return packed_iteration_s(program, self.setting.profile.under(self.layout))

    def observe(self, timeline: Timeline) -> None:
        """Take an executed iteration; the next program made is the first to profit from it."""
        self._executed = timeline


def plan_of(setting: RunContext, config: RunConfig, plans: CachedLayouts | None) -> CachedLayout:
    """Return the plan of a run: an earlier run's with the same planning key, or a new one."""
    key = plan_key(config) if plans else ""
    if plans and (known := plans.read(key)):
        return known
    started = perf_counter()
    layout = setting.plan()
    plan = CachedLayout(layout, perf_counter() - started)
    if plans:
        plans.write(key, plan)
    return plan


# Classes of the parts of strategies whose compiled loops this process has loaded.
_warm: set[tuple[type, ...]] = set()


def warm_up(strategy: Strategy, layout: Layout, profile: Profile) -> None:
    """Make a program once in a process, which loads compiled loops; nothing else depends on it."""
    parts = type(strategy.assigner), type(strategy.scheduler)
    if parts not in _warm:
        place = profile.samples.state
        with suppress(UserError):
            strategy.program(profile.samples.draw(profile.job.global_batch), layout, profile)
        profile.samples.restore(place)
        _warm.add(parts)


def run_experiment(
    config: RunConfig,
    progress: Watcher = unwatched,
    source: ShapeSource | None = None,
    plans: CachedLayouts | None = None,
    keep_timeline: bool = True,
    added: Sequence[Metric] = (),
) -> RunResult:
    """Plan once, then assign, schedule, execute and measure every iteration, also by ``added`` metrics of the user's.

    ``source`` has samples to use instead of the workload's (harness=simulate), ``plans`` those of earlier runs.
    Training always keeps the first timeline. ``UserError`` if configuration, data or a strategy's output is invalid,
    ``ExecutionError`` if the run failed with valid input.
    """
    setting = prepare(config, source)
    if setting.executor.trains:
        if source is not None:
            raise UserError(f"harness={config.harness['label']}: cannot take other samples than those of its workload")
        return _believable(replace(setting.executor.train(config, progress), samples=counts_of(setting.source)), ())
    job = setting.job
    strategy = setting.strategy
    profile = setting.profile
    setting.shared.batch(0, config.seed)
    plan = plan_of(setting, config, plans if source is None else None)
    layout = plan.layout
    check_layout(layout, job.model, job.cluster)
    warm_up(strategy, layout, profile)
    feed = Feed(setting, layout, config.seed)
    upcoming = feed.program(feed.batch(0))
    measured = []
    frame = None
    misfit: OutOfMemoryError | None = None
    for iteration in range(config.iterations):
        program, host_time = upcoming
        if iteration + 1 < config.iterations:
            upcoming = feed.program(feed.batch(iteration + 1))
        try:
            timeline = setting.executor.execute(program)
        except OutOfMemoryError as error:
            if config.on_oom == FAIL:
                raise
            misfit = misfit or error
            progress(iteration + 1)
            continue
        feed.observe(timeline)
        need = setting.shared.need(iteration, config.seed)
        row = measure(timeline, setting.truth, host_time, need, added)
        measured.append({**row, BELIEVED: feed.believed_s(program)})
        if keep_timeline and len(measured) == 1 and program.num_actions <= MAX_KEPT_ACTIONS:
            frame = timeline_frame(timeline)
        progress(iteration + 1)
    if misfit and not measured:
        raise misfit
    metrics = {name: float(np.mean([row[name] for row in measured])) for name in measured[0]}
    metrics[FAILED] = (config.iterations - len(measured)) / config.iterations
    metrics["planning_time_s"] = plan.planning_time_s
    return _believable(RunResult(layout, metrics, tuple(measured), frame, counts_of(setting.source)), added)


def _believable(outcome: RunResult, added: Sequence[Metric]) -> RunResult:
    try:
        check_results(outcome.metrics, outcome.iterations, added)
    except ValueError as error:
        raise ExecutionError(f"the run has invalid metrics: {error}") from error
    return outcome
