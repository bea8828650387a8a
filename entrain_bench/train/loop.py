"""Training on every rank from start to end: plan, build, then for each iteration take its program, run and measure."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from entrain_bench.base.arrays import IntArray
from entrain_bench.base.errors import ExecutionError
from entrain_bench.base.hosttime import HostTime
from entrain_bench.config.schema import RunConfig
from entrain_bench.program import Program
from entrain_bench.program.layout import Layout, check_layout, layout_to_json
from entrain_bench.program.table import timeline_frame
from entrain_bench.program.timeline import Timeline
from entrain_bench.program.validate import check_program
from entrain_bench.records.metrics import BELIEVED, DEVICE_TYPE, RunResult
from entrain_bench.run.experiment import MAX_KEPT_ACTIONS, Feed, RunContext, Watcher, prepare
from entrain_bench.specs.model import ModelSpec
from entrain_bench.train.device import device_name, device_of, dtype_name, prepare_platform
from entrain_bench.train.measuring import (
    OF_THE_CLUSTER,
    Clock,
    live_values,
    mean_metrics,
    metrics_of,
    name_non_finite,
    why_not_of_the_cluster,
)
from entrain_bench.train.messages.control import (
    PlanningGroup,
    gather_values,
    planning_group,
    process_group,
)
from entrain_bench.train.messages.rank_plan import believed_order
from entrain_bench.train.modules.blocks import AttentionKernel, kernel_for
from entrain_bench.train.running.checkpoint import Checkpoints
from entrain_bench.train.running.runtime import Runtime, Work, build_runtime
from entrain_bench.train.settings import TrainSettings


def train(config: RunConfig, progress: Watcher) -> RunResult | None:
    """Run the configuration's iterations on all ranks together; the outcome on rank 0, None on the others."""
    setting = prepare(config)
    settings = setting.executor
    assert isinstance(settings, TrainSettings)
    device = device_of(settings)
    prepare_platform()
    with process_group(device, settings.timeout_s) as control:
        planning = planning_group(settings.planning_timeout_s)
        layout, planning_time_s = plan(setting, planning)
        runtime: Runtime[Any]
        save_weights: Callable[[Path], None] | None = None
        if settings.is_published:
            # Imported where needed: transformers takes seconds.
            from entrain_bench.train.runner.published import published_runtime, save_published

            runtime, model = published_runtime(layout, settings, device, config.seed, control)
            save_weights = partial(save_published, stages=runtime.stages, model=model, control=control)
        else:
            runtime = build_runtime(layout, settings, device, config.seed, control)
        checkpoints = _checkpoints(settings, config, layout, runtime)
        execution = ran_with(setting.job.model, device, runtime.dtype, control, published=settings.is_published)
        reason = why_not_of_the_cluster(device, runtime.dtype, setting.job.cluster)
        history, num_elsewhere = checkpoints.resume(runtime.stages, config.iterations) if checkpoints else ([], 0)
        clock = Clock(device)
        frame = None
        programs = Feed(setting, layout, config.seed)
        feed = WorkFeed(programs, planning, runtime.prepare)
        for iteration in range(len(history), config.iterations):
            work, host_time, exposed_s = feed.take(iteration, last=iteration + 1 == config.iterations)
            for stage in runtime.stages.values():
                optimizer: Any = stage.optimizer
                for group in optimizer.param_groups:
                    group["lr"] = settings.rate_at(iteration, config.iterations)
            seen = runtime.run(work, clock)
            if settings.on_non_finite == "stop" and not isfinite(seen.grad_norm):
                # On all ranks.
                raise ExecutionError(name_non_finite(work.program, iteration, gather_values(seen.losses, control)))
            everyone = gather_values(seen, control)
            if not control.rank():
                left_out = OF_THE_CLUSTER if reason else ()
                row, timeline = metrics_of(work.program, everyone, setting.truth, host_time, left_out)
                believed = {} if reason else {BELIEVED: programs.believed_s(work.program)}
                history.append(row | {"assignment_exposed_s": exposed_s} | believed)
                feed.observe(timeline)
                if frame is None and timeline.program.num_actions <= MAX_KEPT_ACTIONS:
                    frame = timeline_frame(timeline)
            done = iteration + 1
            live = live_values(history[-1], everyone) if not control.rank() else None
            if checkpoints and (done % settings.checkpoint_every == 0 or done == config.iterations):
                checkpoints.save(done, runtime.stages, history, num_elsewhere)
            progress(done, live)
        if settings.save_weights is not None:
            assert save_weights is not None
            save_weights(Path(settings.save_weights))
        if control.rank():
            return None
    counted = history[num_elsewhere:] or history
    metrics = {**mean_metrics(counted), "planning_time_s": planning_time_s}
    remarks = (f"mfu, bounds and shares of time are left out: {reason}",) if reason else ()
    return RunResult(layout, metrics, tuple(history), frame, execution=execution, remarks=remarks)


def plan(setting: RunContext, planning: PlanningGroup) -> tuple[Layout, float]:
    """Rank 0's layout on every rank, and how long planning took there; its exception on every rank if there is none."""

    def make() -> tuple[Layout, float]:
        started = perf_counter()
        layout = setting.plan()
        check_layout(layout, setting.job.model, setting.job.cluster)
        return layout, perf_counter() - started

    answer: tuple[Layout, float] = planning.of_first_rank(make)
    return answer


def _checkpoints(
    settings: TrainSettings, config: RunConfig, layout: Layout, runtime: Runtime[Any]
) -> Checkpoints | None:
    if settings.checkpoint_dir is None:
        return None
    content = config.content()
    identity = {
        "model": str(content["model"]),
        "workload": str(content["workload"]),
        "seed": str(config.seed),
        "global batch": str(config.global_batch),
        "dtype": dtype_name(runtime.dtype),
        "set of frozen modules": str(sorted(config.framework.freeze)),
    }
    setup = {"layout": layout_to_json(layout), "strategy": str(content["strategy"])}
    return Checkpoints(Path(settings.checkpoint_dir), identity, setup, runtime.groups.control)


def ran_with(
    model: ModelSpec, device: torch.device, dtype: torch.dtype, control: dist.ProcessGroup, *, published: bool = False
) -> dict[str, str]:
    """Device, dtype, kernels and versions, all ranks' joined by "and"; collective."""
    name = "transformers" if published else "megatron-core"
    kernels = {
        module.name: AttentionKernel.SDPA if published else kernel_for(module, dtype, device)
        for module in model.modules
    }
    execution = {
        "device": device_name(device),
        DEVICE_TYPE: device.type,
        "dtype": dtype_name(dtype),
        "torch": torch.__version__,
        name.replace("-", "_"): version(name),
        **{f"attention.{module}": str(kernel) for module, kernel in kernels.items()},
    }
    everyone = gather_values(execution, control)
    return {name: " and ".join(dict.fromkeys(said[name] for said in everyone)) for name in execution}


class WorkFeed:
    """Makes programs one iteration ahead in a thread of each rank: rank 0 makes them, all ranks prepare them."""

    def __init__(self, feed: Feed, planning: PlanningGroup, prepare: Callable[[Program, IntArray], Work]) -> None:
        """Begin nothing yet; only this object's threads use ``planning``, whose calls all ranks make in one order."""
        self._feed = feed
        self._planning = planning
        self._prepare = prepare
        self._next: Future[tuple[Work, HostTime]] | None = None
        self._executed: Timeline | None = None

    def take(self, iteration: int, last: bool) -> tuple[Work, HostTime, float]:
        """The work of an iteration, rank 0's time to make it, seconds waited for it; begins the next. Collective."""
        started = perf_counter()
        future = self._next or self._begin(iteration)
        work, host_time = future.result()
        exposed_s = perf_counter() - started
        self._next = None if last else self._begin(iteration + 1)
        return work, host_time, exposed_s

    def observe(self, timeline: Timeline) -> None:
        """Show rank 0's strategy the times of an executed iteration; it uses them from the second next program on."""
        self._executed = timeline

    def _begin(self, iteration: int) -> Future[tuple[Work, HostTime]]:
        # Now, while no thread is active: a thread that runs during an iteration must not see its result.
        if self._executed is not None:
            self._feed.observe(self._executed)
            self._executed = None
        return _in_thread(partial(self._make, iteration))

    def _make(self, iteration: int) -> tuple[Work, HostTime]:
        feed = self._feed
        made = None
        if dist.get_rank() == 0:
            program, host_time = feed.program(feed.batch(iteration))
            check_program(program)
            made = program, believed_order(program, feed.setting.profile.under(feed.layout)), host_time
        program, order, host_time = self._planning.broadcast(made)
        return self._prepare(program, order), host_time


def _in_thread[T](call: Callable[[], T]) -> Future[T]:
    """A call's future result; threads of a pool would keep a failed rank from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name="feed", daemon=True).start()
    return future
