"""Metrics of an executed iteration, and the result of a run; docs/metrics.md states each metric by formula.

A metric in ``SUITE`` is a column of ``table.csv``, a number of records and MLflow, and has a range. A folder of the
user's adds metrics in ``metrics/*.py``. The key of a run does not cover the code of metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from entrain_bench.base.arrays import FloatArray, IntArray, offsets_from_counts, rows_of
from entrain_bench.base.errors import UserError
from entrain_bench.base.hosttime import HostTime
from entrain_bench.config.targets import import_file
from entrain_bench.costs.bound import Need, find_need
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program import Program
from entrain_bench.program.layout import Layout, ModuleLayout
from entrain_bench.program.table import parent_microbatches
from entrain_bench.program.timeline import Timeline
from entrain_bench.records.time_shares import (
    EXPERT_SHARES,
    TIME_SHARES,
    remade_share,
    time_of_experts,
    time_shares,
)
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench.specs.workload import Counts

if TYPE_CHECKING:
    import pandas as pd

TIME = "iteration_time_s"
# The strategy's estimate of the same program: not of the timeline, so ``measure`` does not return it.
BELIEVED = "believed_time_s"
# Share of iterations without a result; a run that has any is not compared.
FAILED = "failed_iterations"
# Shares are differences of sums.
ROUNDING = 1e-9
# Modules with metrics in a folder of the user's.
FOLDER = "metrics"


@dataclass(frozen=True, slots=True)
class Metric:
    """A number that describes an iteration or a run.

    Attributes:
        name, unit: its column, and its unit; ``1`` for a ratio.
        better: ``low`` or ``high``; empty if neither.
        compute: its value for an iteration; None if the executor or the run states it.
        least: smallest possible value; -inf: any float, also infinite or not a number.
        wall_time: whether it is a time of this machine, different in every run.
    """

    name: str
    unit: str
    better: str = ""
    compute: Callable[[ExecutedIteration], float] | None = None
    least: float = 0.0
    wall_time: bool = False


def metric(
    name: str, *, unit: str, better: str = "", least: float = 0.0, wall_time: bool = False
) -> Callable[[Callable[[ExecutedIteration], float]], Metric]:
    """Make a metric of a function of an executed iteration; the attributes of ``Metric`` explain the arguments."""
    return lambda compute: Metric(name, unit, better, compute, least, wall_time)


@dataclass(frozen=True)
class ExecutedIteration:
    """Input of metrics: an executed iteration's timeline, cost model, host time, and its samples' minimum work."""

    timeline: Timeline
    truth: CostTruth
    host_time: HostTime
    need: Need

    @property
    def program(self) -> Program:
        """The executed program, with layout and samples."""
        return self.timeline.program

    @property
    def shapes(self) -> SampleShapes:
        """The samples of the iteration, without padding."""
        return self.program.shapes.unpadded

    @property
    def seconds(self) -> float:
        """The iteration time."""
        return self.timeline.iteration_time_s

    @property
    def num_gpus(self) -> int:
        """GPUs of the cluster, unused ones included."""
        return self.truth.cluster.num_ranks

    @property
    def flops_per_s(self) -> float:
        """Model FLOP/s of a GPU."""
        return self.need.flops / self.seconds / self.num_gpus

    @cached_property
    def bound_s(self) -> float:
        """Lower bound of the iteration time under the layout, in seconds."""
        split = any(self.program.splits_backward(index) for index in range(len(self.program.chunks)))
        return self.need.lower_bound_s(self.truth, self.program.layout, self.shapes, split)

    @property
    def core_s(self) -> float:
        """Seconds from the start of the first pass to the end of the last one."""
        passes = self.program.is_pass
        return float(self.timeline.end_s[passes].max() - self.timeline.start_s[passes].min())

    @property
    def busy_s(self) -> float:
        """Seconds of all actions, over all ranks."""
        return rank_seconds(self.timeline, self.timeline.end_s - self.timeline.start_s)

    @property
    def waits_s(self) -> float:
        """Seconds of exposed communication, over all ranks."""
        return rank_seconds(self.timeline, self.timeline.comm_s + self.timeline.transfer_wait_s)

    @property
    def encoders(self) -> list[int]:
        """Indices of the encoders among the model's modules."""
        return [index for index, module in enumerate(self.truth.model.modules) if module.is_encoder]

    @cached_property
    def shares(self) -> dict[str, float]:
        """Shares of GPU time, by ``TIME_SHARES``, and of experts, if there are any."""
        remade = remade_share(self.truth, self.program)
        experts = time_of_experts(self.truth, self.program)
        return time_shares(self.timeline, self.num_gpus, self.need.gpu_s, remade, experts)


def _share(name: str) -> Callable[[ExecutedIteration], float]:
    return lambda run: run.shares[name]


# Metrics of every run, in the order of the table's columns.
SUITE: tuple[Metric, ...] = (
    Metric(TIME, "s", "low", lambda run: run.seconds),
    Metric(BELIEVED, "s"),
    Metric("core_time_s", "s", "low", lambda run: run.core_s),
    Metric("samples_per_s", "1/s", "high", lambda run: len(run.shapes) / run.seconds),
    Metric("tokens_per_s", "1/s", "high", lambda run: float(run.shapes.llm_tokens.sum()) / run.seconds),
    Metric("tflops_per_gpu", "TFLOP/s", "high", lambda run: run.flops_per_s / 1e12),
    Metric("mfu", "1", "high", lambda run: run.flops_per_s / run.truth.cluster.device.peak_bf16_flops),
    Metric("bubble_ratio", "1", "low", lambda run: 1.0 - run.busy_s / (run.num_gpus * run.seconds), least=-1.0),
    Metric("encoder_forward_std_ms", "ms", "low", lambda run: forward_std_ms(run.timeline, run.encoders)),
    Metric("llm_forward_std_ms", "ms", "low", lambda run: forward_std_ms(run.timeline, [run.truth.model.llm_index])),
    Metric("peak_memory_bytes", "bytes", "low", lambda run: float(run.timeline.peak_memory_bytes.max())),
    Metric("exposed_comm_s", "s", "low", lambda run: run.waits_s / run.num_gpus),
    Metric(FAILED, "1", "low"),
    Metric("planning_time_s", "s", "low", wall_time=True),
    Metric("assignment_time_s", "s", "low", lambda run: run.host_time.total_s, wall_time=True),
    Metric("assignment_exposed_s", "s", "low", lambda run: run.host_time.exposed_s(run.seconds), wall_time=True),
    Metric("lower_bound_s", "s", compute=lambda run: run.bound_s),
    Metric("gap_to_lower_bound", "1", "low", lambda run: run.seconds / run.bound_s - 1.0, least=-1.0),
    Metric("cluster_bound_s", "s", compute=lambda run: run.need.bound_s),
    *(Metric(name, "1", compute=_share(name)) for name in TIME_SHARES),
)
# Metrics that runs with experts add, after the others.
OF_EXPERTS = tuple(Metric(name, "1") for name in EXPERT_SHARES)
# Metrics that training adds. A loss may be infinite or not a number.
TRAINING = (
    Metric("loss", "1", "low", least=-inf),
    Metric("grad_norm", "1", least=-inf),
    Metric("skipped_updates", "1", "low"),
    Metric("input_stall_s", "s", "low"),
    Metric("input_stall_mean_s", "s", "low"),
)
KNOWN = {one.name: one for one in (*SUITE, *OF_EXPERTS, *TRAINING)}


def metrics_in(config_dir: str) -> tuple[Metric, ...]:
    """The metrics that a folder of the user's defines in ``metrics/*.py``; none for an empty name.

    ``UserError`` for a file that cannot be imported, and a name that another metric has.
    """
    files = sorted(Path(config_dir, FOLDER).glob("[!_]*.py")) if config_dir else []
    return _metrics_of_files(tuple((file, file.stat().st_mtime_ns) for file in files))


@cache
def _metrics_of_files(files: tuple[tuple[Path, int], ...]) -> tuple[Metric, ...]:
    added: dict[str, Metric] = {}
    for file, _ in files:
        module = import_file(file, f"{__name__}_theirs_{file.stem}")
        for one in (value for value in vars(module).values() if isinstance(value, Metric)):
            if one.name in KNOWN or one.name in added:
                raise UserError(f"{file}: metric {one.name}: must have a name that no other metric has")
            added[one.name] = one
    return tuple(added.values())


def measure(
    timeline: Timeline,
    truth: CostTruth,
    host_time: HostTime | None = None,
    need: Need | None = None,
    added: Iterable[Metric] = (),
) -> dict[str, float]:
    """The metrics of one iteration, and those ``added`` of the user's (``metrics_in``), by their columns."""
    need = find_need(truth, timeline.program.shapes.unpadded) if need is None else need
    run = ExecutedIteration(timeline, truth, host_time or HostTime(), need)
    values = {one.name: one.compute(run) for one in (*SUITE, *added) if one.compute}
    return values | {name: run.shares[name] for name in EXPERT_SHARES if name in run.shares}


def check_numbers(metrics: Mapping[str, object], added: Iterable[Metric] = ()) -> None:
    """Raise ``ValueError`` naming the first metric with an impossible value; an unknown one may be any finite value."""
    known = KNOWN | {one.name: one for one in added}
    for name, value in metrics.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"{name}={value!r} is not a number")
        if name not in known and not isfinite(value):
            raise ValueError(f"{name}={value!r} must be finite")
        least = known[name].least if name in known else -inf
        if least > -inf and not (isfinite(value) and value >= least - ROUNDING):
            raise ValueError(f"{name}={value!r} must be finite and at least {least:g}")


def check_results(
    metrics: Mapping[str, object], iterations: Iterable[Mapping[str, object]], added: Iterable[Metric] = ()
) -> None:
    """Raise ``ValueError`` for the means and the iterations of a run with a result, if a value is impossible."""
    for values in (metrics, *iterations):
        check_numbers(values, added)
    if not metrics.get(TIME):
        raise ValueError(f"{TIME}={metrics.get(TIME)!r} must be above 0")


# The key in ``RunResult.execution`` of the device of ranks that trained: cpu or cuda.
DEVICE_TYPE = "device_type"


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a run.

    Attributes:
        layout: the planned layout.
        metrics: means over iterations by table column.
        iterations: the metrics of each iteration.
        timeline: the first iteration's timeline as a table; None if it is too large to keep.
        samples: of a workload that lists its samples their number (``listed``), and how many the model's context
            changed (``truncated``, ``dropped``); of a mixture the same by component, with its ``share``; else empty.
        execution: of a training run, by name: device, dtype, kernels, versions of packages.
        remarks: notes for readers of its metrics, one line each.
    """

    layout: Layout
    metrics: Mapping[str, float]
    iterations: tuple[Mapping[str, float], ...]
    timeline: pd.DataFrame | None
    samples: Counts = field(default_factory=dict)
    execution: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


def microbatch_forward(timeline: Timeline, modules: Sequence[int]) -> tuple[IntArray, FloatArray]:
    """Replica and forward time of every microbatch, summed over the modules' stages and parts ``[microbatches]``.

    Sub-microbatches of an encoder count as the microbatch that they are parts of (``parent_microbatches``). A
    microbatch with LLM work only counts as zero for modules that share the LLM's replicas. If groups have several
    widths, every rank of a stage counts as a replica, with the microbatches of all its groups.
    """
    program = timeline.program
    llm = timeline.program.model.llm_index
    duration_s = timeline.end_s - timeline.start_s
    placed = program.layout.modules
    grouped = any(len(placed[index].widths) > 1 for index in (*modules, llm))

    def by_replica(index: int) -> tuple[IntArray, IntArray, FloatArray]:
        replica = program.chunks[index].replica
        microbatch = parent_microbatches(program, index)
        seconds = duration_s[program.forward_actions(index)].sum(axis=1)
        if not grouped:
            return replica, microbatch, seconds
        rows, place = _on_ranks(placed[index], replica)
        return place, microbatch[rows], seconds[rows]

    own = [by_replica(index) for index in modules]
    sizes = [each.plane.shape[1] if grouped else each.copies for each in placed]
    if all(sizes[index] == sizes[llm] for index in modules):
        replica, microbatch, seconds = by_replica(llm)
        own.append((replica, microbatch, np.zeros_like(seconds)))
    replica, microbatch, seconds = (np.concatenate(column) for column in zip(*own, strict=True))
    places, place = np.unique(np.stack([replica, microbatch]), axis=1, return_inverse=True)
    return places[0], np.bincount(place.ravel(), weights=seconds, minlength=places.shape[1])


def _on_ranks(placed: ModuleLayout, replica: IntArray) -> tuple[IntArray, IntArray]:
    """Return every chunk once per rank of its group, and the rank's place on its stage, counted from 0."""
    size = np.array([tp * cp for tp, cp in placed.degrees])[placed.degree_of_copy]
    first = np.concatenate([np.arange(count) for count in placed.num_groups]) * size
    offsets = offsets_from_counts(size[replica])
    rows = rows_of(offsets)
    return rows, first[replica][rows] + np.arange(len(rows)) - offsets[rows]


def forward_std_ms(timeline: Timeline, modules: Sequence[int]) -> float:
    """Standard deviation of the forward time over a replica's microbatches, averaged over replicas, milliseconds."""
    replica, forward_s = microbatch_forward(timeline, modules)
    count = np.bincount(replica)
    if not len(count):
        return 0.0
    each = np.maximum(count, 1)
    apart = forward_s - (np.bincount(replica, weights=forward_s) / each)[replica]
    std = np.sqrt(np.bincount(replica, weights=apart * apart) / each)
    return float(std[count > 0].mean()) * 1e3


def rank_seconds(timeline: Timeline, seconds: FloatArray) -> float:
    """Sum over ranks of a per-action quantity: each action counts for every rank it occupies."""
    program = timeline.program
    width = program.layout.lane_width[rows_of(program.lane_offsets)]
    return float((seconds[program.lane_actions] * width).sum())
