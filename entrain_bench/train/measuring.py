"""Measurements of ranks: times of actions on one clock, merged to a timeline, a loss and metrics."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isfinite
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from entrain_bench.base.arrays import FloatArray, rows_of
from entrain_bench.base.hosttime import HostTime
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program import Pass, Program
from entrain_bench.program.timeline import Timeline
from entrain_bench.records.metrics import measure
from entrain_bench.records.time_shares import EXPERT_SHARES, TIME_SHARES
from entrain_bench.specs.cluster import ClusterSpec
from entrain_bench.train.device import dtype_name
from entrain_bench.train.messages.rank_plan import lane_of_rank

# The fastest round trip counts, because a loaded host may delay some.
ROUND_TRIPS = 4
# An event of CUDA, or seconds of the host.
Mark = Any
# Metrics that depend on constants of the cluster's GPUs.
OF_THE_CLUSTER = ("mfu", "lower_bound_s", "gap_to_lower_bound", "cluster_bound_s", *TIME_SHARES, *EXPERT_SHARES)


LIVE = ("loss", "grad_norm", "iteration_time_s", "tokens_per_s", "peak_memory_bytes", "input_stall_s")
# Samples that an error names at most.
MOST_NAMED = 8
SKIP = "To skip such updates and continue, set harness.on_non_finite=skip"


@dataclass(slots=True)
class Clock:
    """Start and end of a rank's actions in seconds from ``began_s``, a time of rank 0's clock."""

    device: torch.device
    timer: Callable[[], float] = perf_counter
    began_s: float = 0.0
    _ran: list[tuple[int, Mark, Mark]] = field(default_factory=list)
    _zero: Mark = 0.0

    def start_together(self, control: dist.ProcessGroup) -> None:
        """Set zero to a moment at which all ranks' devices are idle; collective over all ranks."""
        offset_s = clock_offset(control, self.timer)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.barrier(group=control)
        self.began_s = self.timer() + offset_s
        self.start()

    def start(self) -> None:
        """Take this moment as zero."""
        self._ran.clear()
        self._zero = self._mark()

    @contextmanager
    def action(self, action: int) -> Iterator[None]:
        """Time the body of a ``with`` statement as one action."""
        start = self._mark()
        yield
        self._ran.append((action, start, self._mark()))

    def rows(self) -> FloatArray:
        """Action, start and end of everything that ran ``[actions, 3]``; waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        rows = [(action, self._seconds(start), self._seconds(end)) for action, start, end in self._ran]
        return np.array(rows, dtype=np.float64).reshape(-1, 3)

    def seconds(self) -> FloatArray:
        """Seconds of everything that ran ``[actions]``; waits for the device."""
        rows = self.rows()
        return np.asarray(rows[:, 2] - rows[:, 1])

    def _mark(self) -> Mark:
        if self.device.type != "cuda":
            return self.timer()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _seconds(self, mark: Mark) -> float:
        return mark - self._zero if self.device.type != "cuda" else float(self._zero.elapsed_time(mark)) / 1e3


def clock_offset(control: dist.ProcessGroup, timer: Callable[[], float]) -> float:
    """Seconds to add to this rank's clock for rank 0's, as NTP does (RFC 5905, section 8); collective."""
    told_s = torch.zeros(1, dtype=torch.float64)
    if control.rank() == 0:
        for rank in range(1, control.size()):
            for _ in range(ROUND_TRIPS):
                dist.recv(told_s, rank, group=control)
                dist.send(told_s.fill_(timer()), rank, group=control)
        return 0.0
    trips = []
    for _ in range(ROUND_TRIPS):
        asked_s = timer()
        dist.send(told_s, 0, group=control)
        dist.recv(told_s, 0, group=control)
        answered_s = timer()
        trips.append((answered_s - asked_s, float(told_s) - (asked_s + answered_s) / 2))
    return min(trips)[1]


def on_one_clock(rows: Sequence[FloatArray], began_s: Sequence[float]) -> list[FloatArray]:
    """Action, start and end by rank ``[ranks][actions, 3]``, in seconds since the first rank began (``began_s``)."""
    first_s = min(began_s)
    return [times + (s - first_s) * np.array([0.0, 1.0, 1.0]) for times, s in zip(rows, began_s, strict=True)]


@dataclass(frozen=True, slots=True)
class Seen:
    """Measurements of one rank in an iteration."""

    # action, start and end of each pass ``[actions, 3]``, in seconds since ``began_s`` on rank 0's clock
    rows: FloatArray
    began_s: float
    losses: list[tuple[int, float]]  # action and loss of each LLM chunk, divided by the batch's predicted tokens
    grad_norm: float  # of all modules before clipping; if it is not finite, no rank changed its weights
    peak_bytes: float  # peak of the device's allocator; on a CPU, of the whole process
    input_stall_s: float = 0.0  # seconds that the rank waited for inputs of its forwards


def see(losses: Sequence[tuple[int, Tensor]], grad_norm: float, input_stall_s: float, clock: Clock) -> Seen:
    """Read the measurements of this rank; waits for the device."""
    values = torch.stack([loss for _, loss in losses]).tolist() if losses else []
    rows = clock.rows()
    if clock.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(clock.device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    read = [(action, value) for (action, _), value in zip(losses, values, strict=True)]
    return Seen(rows, clock.began_s, read, grad_norm, float(peak), input_stall_s)


def name_non_finite(program: Program, iteration: int, losses: Sequence[Sequence[tuple[int, float]]]) -> str:
    """Return one line that names iteration, microbatch and samples of the first loss that is not finite."""
    for action, loss in (row for of_rank in losses for row in of_rank):
        if not isfinite(loss):
            view = program.view(action)
            samples = [program.shapes.name_of(sample) for sample in view.members]
            named = ", ".join(samples[:MOST_NAMED]) + (", ..." if len(samples) > MOST_NAMED else "")
            return (
                f"loss={loss} in iteration {iteration}, microbatch {view.microbatch} of replica {view.replica} "
                f"(samples {named}). {SKIP}"
            )
    return f"grad_norm is not finite in iteration {iteration}, although all losses are finite. {SKIP}"


def why_not_of_the_cluster(device: torch.device, dtype: torch.dtype, cluster: ClusterSpec) -> str:
    """Return why a run cannot be compared with the cluster's constants; empty if it can."""
    if device.type == "cpu":
        return "ranks compute on a CPU, but the cluster's constants describe GPUs"
    if (ran := dtype_name(dtype)) != (peak := cluster.device.peak_dtype):
        return f"the run used {ran}, but the peak of {cluster.device.name} is stated for {peak}"
    return ""


def total_loss(losses: Sequence[Sequence[tuple[int, float]]]) -> float:
    """Return the mean loss per predicted token, from action and loss of every chunk that each rank counts."""
    return float(sum(loss for of_rank in losses for _, loss in of_rank))


def merge_timeline(program: Program, rows: Sequence[FloatArray], peak_bytes: Sequence[float]) -> Timeline:
    """Merge the rows (action, start, end) of all ranks ``[ranks][actions, 3]`` to one timeline.

    Ranks of an action wait for each other inside, so it starts when the last of them does. It waits for a transfer from
    the moment when its ranks are free and its inputs computed.
    """
    start, end = np.full((2, program.num_actions), -np.inf)
    for of_rank in rows:
        action = of_rank[:, 0].astype(np.int64)
        np.maximum.at(start, action, of_rank[:, 1])
        np.maximum.at(end, action, of_rank[:, 2])
    comm = np.where(program.kind == Pass.GRAD_SYNC, end - start, 0.0)
    peak = np.zeros(program.layout.num_lanes)
    for rank, need in enumerate(peak_bytes):
        lane_index = lane_of_rank(program.layout, rank)
        if lane_index is not None:
            peak[lane_index] = max(peak[lane_index], need)
    ready = np.zeros(program.num_actions)
    np.maximum.at(ready, rows_of(program.dep_offsets), end[program.dep_actions])
    lane = rows_of(program.lane_offsets)
    ordered = program.lane_actions
    follows = lane[1:] == lane[:-1]
    np.maximum.at(ready, ordered[1:][follows], end[ordered[:-1][follows]])
    waited = np.where(np.diff(program.dep_offsets) > 0, np.maximum(start - ready, 0.0), 0.0)
    return Timeline(program, start, end, comm, waited, peak)


def metrics_of(
    program: Program, everyone: Sequence[Seen], truth: CostTruth, host_time: HostTime, left_out: Sequence[str] = ()
) -> tuple[dict[str, float], Timeline]:
    """Return the metrics of an iteration, without those ``left_out``, and its timeline."""
    grad_norm = everyone[0].grad_norm
    stalls_s = [seen.input_stall_s for seen in everyone]
    rows = on_one_clock([seen.rows for seen in everyone], [seen.began_s for seen in everyone])
    timeline = merge_timeline(program, rows, [seen.peak_bytes for seen in everyone])
    row = {name: value for name, value in measure(timeline, truth, host_time).items() if name not in left_out}
    row |= {
        "loss": total_loss([seen.losses for seen in everyone]),
        "grad_norm": grad_norm,
        "skipped_updates": float(not isfinite(grad_norm)),
        "input_stall_s": max(stalls_s),
        "input_stall_mean_s": float(np.mean(stalls_s)),
    }
    return row, timeline


def live_values(row: Mapping[str, float], everyone: Sequence[Seen]) -> dict[str, float]:
    """Return the values shown during training; balance is the maximum over the mean of the ranks' busy times."""
    busy_s = np.array([float((seen.rows[:, 2] - seen.rows[:, 1]).sum()) for seen in everyone])
    mean_s = float(busy_s.mean())
    known = {name: row[name] for name in LIVE if name in row}
    return known | ({"balance": float(busy_s.max()) / mean_s} if mean_s else {})


def mean_metrics(history: list[dict[str, float]]) -> dict[str, float]:
    """Return means of finite values over iterations; the first (warm-up) counts only if it is the only one."""
    rows = history[1:] or history
    values = {name: [row[name] for row in rows if isfinite(row[name])] for name in history[0]}
    return {name: float(np.mean(finite)) for name, finite in values.items() if finite}
