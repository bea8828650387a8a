"""Metrics of a timeline; docs/metrics.md states each by formula."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from entrain_bench.arrays import FloatArray, rows_of
from entrain_bench.bound import lower_bound_s
from entrain_bench.costs.truth import CostTruth
from entrain_bench.program import Pass
from entrain_bench.timeline import Timeline

# A backward takes twice the forward's model FLOPs.
TRAINING_FLOPS = 3.0


def microbatch_forward(timeline: Timeline, modules: Sequence[int]) -> pd.DataFrame:
    """Forward time of every microbatch of the given modules together, summed over stages and parts.

    A microbatch that only has LLM work counts as zero for modules that share the LLM's replicas.

    Returns:
        Columns ``replica``, ``microbatch``, ``forward_s``.
    """
    program = timeline.program
    duration = timeline.end_s - timeline.start_s
    rows = [
        pd.DataFrame(
            {
                "replica": program.chunks[index].replica,
                "microbatch": program.chunks[index].microbatch,
                "forward_s": duration[program.forward_actions(index)].sum(axis=1),
            }
        )
        for index in modules
    ]
    llm = program.model.llm_index
    if all(program.layout.modules[index].dp == program.layout.modules[llm].dp for index in modules):
        chunks = program.chunks[llm]
        rows.append(pd.DataFrame({"replica": chunks.replica, "microbatch": chunks.microbatch, "forward_s": 0.0}))
    return pd.concat(rows).groupby(["replica", "microbatch"])["forward_s"].sum().reset_index()


def forward_std_ms(timeline: Timeline, modules: Sequence[int]) -> float:
    """Standard deviation of the forward time over a replica's microbatches, averaged over replicas, milliseconds."""
    forward = microbatch_forward(timeline, modules)
    if forward.empty:
        return 0.0
    return float(forward.groupby("replica")["forward_s"].std(ddof=0).mean()) * 1e3


def rank_seconds(timeline: Timeline, seconds: FloatArray) -> float:
    """Sum over ranks of a per-action quantity: each action counts for every rank it occupies."""
    program = timeline.program
    width = program.layout.lane_width[rows_of(program.lane_offsets)]
    return float((seconds[program.lane_actions] * width).sum())


def measure(timeline: Timeline, truth: CostTruth, assignment_time_s: float) -> dict[str, float]:
    """The metrics of one iteration, by the column names of ``results/table.csv``."""
    program, cluster = timeline.program, truth.cluster
    encoders = [index for index, module in enumerate(truth.model.modules) if module.is_encoder]
    executed_s = timeline.iteration_time_s
    # Assignment runs beside the iteration before; only what outlasts an iteration is paid.
    seconds = max(executed_s, assignment_time_s)
    flops = TRAINING_FLOPS * truth.model.forward_flops(program.shapes)
    flops_per_s = flops / seconds / cluster.num_ranks
    bound_s = lower_bound_s(truth, program.layout, program.shapes)
    busy_s = rank_seconds(timeline, timeline.end_s - timeline.start_s)
    exposed_s = rank_seconds(timeline, timeline.comm_s + timeline.transfer_wait_s)
    return {
        "iteration_time_s": seconds,
        "samples_per_s": len(program.shapes) / seconds,
        "tokens_per_s": float(program.shapes.llm_tokens.sum()) / seconds,
        "tflops_per_gpu": flops_per_s / 1e12,
        "mfu": flops_per_s / cluster.device.peak_bf16_flops,
        "bubble_ratio": 1.0 - busy_s / (cluster.num_ranks * executed_s),
        "encoder_forward_std_ms": forward_std_ms(timeline, encoders) if encoders else 0.0,
        "llm_forward_std_ms": forward_std_ms(timeline, [truth.model.llm_index]),
        "peak_memory_bytes": float(timeline.peak_memory_bytes.max()),
        "exposed_comm_s": exposed_s / cluster.num_ranks,
        "assignment_time_s": assignment_time_s,
        "lower_bound_s": bound_s,
        "gap_to_lower_bound": seconds / bound_s - 1.0,
    }


def num_microbatches(timeline: Timeline) -> float:
    """LLM microbatches of a replica, on average."""
    program = timeline.program
    llm = program.model.llm_index
    chunks = program.chunks[llm]
    return len(np.unique(np.stack([chunks.replica, chunks.microbatch]), axis=1).T) / program.layout.modules[llm].dp


def timeline_frame(timeline: Timeline) -> pd.DataFrame:
    """A timeline as a table, one row for each action and lane it occupies, for figures and files.

    ``memory_bytes`` and ``memory_after_bytes``, of a rank of the lane while the action runs and after it, are there if
    the executor can tell.
    """
    program = timeline.program
    lane, action = rows_of(program.lane_offsets), program.lane_actions
    module = program.module[action]
    names = np.array([spec.name for spec in program.model.modules])
    chunk = program.chunk[action]
    labels = {name: np.full(len(action), -1) for name in ("microbatch", "part")}
    for index, chunks in enumerate(program.chunks):
        mine = (module == index) & (chunk >= 0)
        for name, column in labels.items():
            column[mine] = getattr(chunks, name)[chunk[mine]]
    frame = pd.DataFrame(
        {
            "lane": lane,
            "rank": program.layout.lane_first_rank[lane],
            "num_ranks": program.layout.lane_width[lane],
            "module": names[module],
            "stage": program.stage[action],
            "replica": program.replica[action],
            "microbatch": labels["microbatch"],
            "part": labels["part"],
            "pass": np.array([kind.name.lower() for kind in Pass])[program.kind[action]],
            "start_s": timeline.start_s[action],
            "end_s": timeline.end_s[action],
            "comm_s": timeline.comm_s[action],
            "transfer_wait_s": timeline.transfer_wait_s[action],
        }
    )
    if timeline.memory_bytes is not None:
        frame["memory_bytes"], frame["memory_after_bytes"] = timeline.memory_bytes
    return frame


def memory_steps(frame: pd.DataFrame) -> pd.DataFrame:
    """Memory of a rank of each lane over time, from the columns of ``timeline_frame``.

    Returns:
        Columns ``lane``, ``rank``, ``time_s``, ``bytes``, by lane and time: the memory from that time until the lane's
        next row. Before its first row a lane holds what it holds after its last one.
    """
    lanes = frame[["lane", "rank"]]
    running = lanes.assign(time_s=frame["start_s"], bytes=frame["memory_bytes"])
    ended = lanes.assign(time_s=frame["end_s"], bytes=frame["memory_after_bytes"])
    # Entries of a lane follow each other in time: alternating them keeps the order where times are equal.
    return pd.concat([running, ended]).sort_index(kind="stable").reset_index(drop=True)


def chrome_trace(frame: pd.DataFrame) -> dict[str, object]:
    """A timeline table in the Chrome trace format (chrome://tracing, Perfetto), times in microseconds.

    Processes are replicas, threads are lanes named by their first rank.
    """
    lanes = frame[frame["replica"] >= 0].drop_duplicates("lane").set_index("lane")["replica"]
    events: list[dict[str, object]] = []
    for lane, rank in frame.drop_duplicates("lane")[["lane", "rank"]].itertuples(index=False):
        replica = int(lanes.get(lane, -1))
        name = {"name": f"rank {rank}"}
        events.append({"ph": "M", "name": "thread_name", "pid": replica, "tid": int(lane), "args": name})
    for row in frame.to_dict("records"):
        start = float(row["start_s"]) * 1e6
        events.append(
            {
                "ph": "X",
                "name": f"{row['pass']} {row['module']} {row['microbatch']}" if row["microbatch"] >= 0 else row["pass"],
                "cat": row["pass"],
                "pid": int(lanes.get(row["lane"], -1)),
                "tid": int(row["lane"]),
                "ts": start,
                "dur": float(row["end_s"]) * 1e6 - start,
                "args": {"stage": int(row["stage"]), "part": int(row["part"])},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
