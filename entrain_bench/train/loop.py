"""Training, start to end, on every rank: plan, build, and for each iteration compose, run, measure, keep."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from time import perf_counter

import numpy as np
import torch.distributed as dist

from entrain_bench.config import RunConfig
from entrain_bench.errors import ExecutionError, IncompatibleError, UserError, require
from entrain_bench.experiment import MAX_KEPT_ACTIONS, Outcome, Setting, prepare
from entrain_bench.layout import Layout, check_layout
from entrain_bench.metrics import measure, timeline_frame
from entrain_bench.timeline import Timeline
from entrain_bench.train.build import build_runtime
from entrain_bench.train.checkpoint import Checkpoints
from entrain_bench.train.clock import Clock
from entrain_bench.train.compose import Composed, Composer
from entrain_bench.train.control import broadcast_bytes, gather_json, process_group
from entrain_bench.train.harness import TrainHarness
from entrain_bench.train.losses import name_non_finite, total_loss
from entrain_bench.train.memory import peak_bytes
from entrain_bench.train.merge import merge_timeline
from entrain_bench.train.platform import prepare_platform
from entrain_bench.train.profiling import profiler
from entrain_bench.train.runtime import RankResult, Runtime
from entrain_bench.train.wire import layout_from_json, layout_to_json

# What the simulator's constants of the cluster say nothing about when ranks compute on a CPU.
OF_THE_CLUSTER = ("mfu", "lower_bound_s", "gap_to_lower_bound")


def train(config: RunConfig, progress: Callable[[int], None]) -> Outcome:
    """Run the configuration's iterations on all ranks together; every rank returns rank 0's outcome or its share.

    Raises:
        UserError: for what does not fit, or another run's checkpoint.
        ExecutionError: for a loss that is not finite, unless such updates are skipped.
    """
    setting = prepare(config)
    harness: TrainHarness = setting.executor  # type: ignore[assignment]
    device = harness.torch_device
    prepare_platform()
    with process_group(device, harness.timeout_s) as control:
        layout, planning_time_s = plan(setting, control)
        runtime = build_runtime(setting.job, layout, harness, device, config.seed, control)
        checkpoints = _checkpoints(harness, config, layout)
        history = resume(checkpoints, runtime, config.iterations)
        clock, frame = Clock(device), None
        composer = Composer(setting, layout, config.seed, control)
        try:
            for iteration in range(len(history), config.iterations):
                composed = composer.take(iteration, last=iteration + 1 == config.iterations)
                with profiler(harness.profile_dir, iteration):
                    result = runtime.run(composed.program, clock)
                row, timeline = _measure(setting, runtime, composed, result, clock, iteration, control)
                composer.observe(timeline)
                history.append(row)
                done = iteration + 1
                if frame is None and composed.program.num_actions <= MAX_KEPT_ACTIONS:
                    frame = timeline_frame(timeline)
                if checkpoints and (done % harness.checkpoint_every == 0 or done == config.iterations):
                    checkpoints.save(done, runtime.stages, history)
                progress(done)
        finally:
            composer.close()
    return Outcome(layout, {**mean_metrics(history), "planning_time_s": planning_time_s}, tuple(history), frame)


def mean_metrics(history: list[dict[str, float]]) -> dict[str, float]:
    """Means over iterations; the first, which warms up, counts only if it is the only one.

    A skipped update has no loss to count.
    """
    rows = history[1:] or history
    values = {name: [row[name] for row in rows if isfinite(row[name])] for name in history[0]}
    return {name: float(np.mean(finite)) for name, finite in values.items() if finite}


def plan(setting: Setting, control: dist.ProcessGroup) -> tuple[Layout, float]:
    """Rank 0's layout on every rank, and how long planning took there.

    Raises:
        UserError: on every rank, if there is no layout.
    """
    answer: dict[str, str] = {}
    seconds = 0.0
    if dist.get_rank() == 0:
        started = perf_counter()
        try:
            layout = setting.strategy.plan(setting.profile)
            check_layout(layout, setting.job.model, setting.job.cluster)
            answer = {"layout": layout_to_json(layout)}
        except IncompatibleError as error:
            answer = {"incompatible": str(error)}
        except UserError as error:
            answer = {"error": str(error)}
        seconds = perf_counter() - started
    answer = json.loads(broadcast_bytes(json.dumps(answer).encode() if answer else None, control))
    if "incompatible" in answer:
        raise IncompatibleError(answer["incompatible"])
    if "error" in answer:
        raise UserError(answer["error"])
    return layout_from_json(answer["layout"]), seconds


def resume(checkpoints: Checkpoints | None, runtime: Runtime, iterations: int) -> list[dict[str, float]]:
    """Load the newest checkpoint, if there is one; returns the metrics of the iterations it has behind it.

    Raises:
        UserError: if it is of another run, damaged, or beyond the run's iterations.
    """
    found = checkpoints.latest() if checkpoints else None
    if checkpoints is None or found is None:
        return []
    path, history = found
    require(iterations >= len(history), "iterations", iterations, f"at least the {len(history)} of the checkpoint")
    checkpoints.load(path, runtime.stages)
    return history


def _checkpoints(harness: TrainHarness, config: RunConfig, layout: Layout) -> Checkpoints | None:
    if harness.checkpoint_dir is None:
        return None
    content = config.content()
    identity = {
        "model": str(content["model"]),
        "layout": layout_to_json(layout),
        "strategy": str(content["strategy"]),
        "workload": str(content["workload"]),
        "seed": str(config.seed),
        "global batch": str(config.global_batch),
        "dtype": harness.dtype,
        "distributed optimizer": str(config.distributed_optimizer),
    }
    return Checkpoints(Path(harness.checkpoint_dir), identity)


def _measure(
    setting: Setting,
    runtime: Runtime,
    composed: Composed,
    result: RankResult,
    clock: Clock,
    iteration: int,
    control: dist.ProcessGroup,
) -> tuple[dict[str, float], Timeline]:
    """Metrics of the iteration and its timeline; gathers what every rank saw.

    Raises:
        ExecutionError: naming iteration, microbatch and samples of a loss that is not finite.
    """
    program = composed.program
    losses = [(row.action, float(row.loss)) for row in result.losses]
    own = {"rows": clock.rows().tolist(), "losses": losses, "peak": peak_bytes(runtime.device)}
    seen = gather_json(own, control)
    loss = total_loss(program, [rank["losses"] for rank in seen])
    harness: TrainHarness = setting.executor  # type: ignore[assignment]
    updated = isfinite(result.grad_norm)
    if harness.on_non_finite == "stop" and not updated:
        raise ExecutionError(name_non_finite(program, iteration, [rank["losses"] for rank in seen]))
    rows = [np.array(rank["rows"]).reshape(-1, 3) for rank in seen]
    timeline = merge_timeline(program, rows, [rank["peak"] for rank in seen])
    row = measure(timeline, setting.truth, composed.assignment_time_s)
    if runtime.device.type == "cpu":
        row = {name: value for name, value in row.items() if name not in OF_THE_CLUSTER}
    row |= {"loss": loss, "grad_norm": result.grad_norm, "skipped_updates": float(not updated)}
    return row | {"exposed_assignment_time_s": composed.exposed_s}, timeline
