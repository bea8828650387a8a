"""Timelines as tables, for figures, files and other programs."""

from typing import TYPE_CHECKING

import numpy as np

from entrain_bench.base.arrays import IntArray, rows_of
from entrain_bench.program.columns import Pass, Program
from entrain_bench.program.timeline import Timeline

if TYPE_CHECKING:
    import pandas as pd


def timeline_frame(timeline: Timeline) -> "pd.DataFrame":
    """A timeline as a table, one row for each action and lane it occupies; memory is during and after an action."""
    # A run starts before pandas is imported.
    import pandas as pd

    program = timeline.program
    lane = rows_of(program.lane_offsets)
    action = program.lane_actions
    module = program.module[action]
    names = np.array([spec.name for spec in program.model.modules])
    chunk = program.chunk[action]
    labels = {name: np.full(len(action), -1) for name in ("microbatch", "part", "parent")}
    for index, chunks in enumerate(program.chunks):
        mine = (module == index) & (chunk >= 0)
        of_chunks = (chunks.microbatch, chunks.part, parent_microbatches(program, index))
        for column, values in zip(labels.values(), of_chunks, strict=True):
            column[mine] = values[chunk[mine]]
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
            "parent": labels["parent"],
            "pass": np.array([kind.name.lower() for kind in Pass])[program.kind[action]],
            "start_s": timeline.start_s[action],
            "end_s": timeline.end_s[action],
            "comm_s": timeline.comm_s[action],
            "transfer_wait_s": timeline.transfer_wait_s[action],
        }
    )
    if any(len(placed.widths) > 1 for placed in program.layout.modules):
        group_names = np.array([program.group_name(action) for action in range(program.num_actions)])
        frame["group"] = group_names[action]
    if timeline.memory_bytes is not None:
        frame["memory_bytes"], frame["memory_after_bytes"] = timeline.memory_bytes
    return frame


def chrome_trace(frame: "pd.DataFrame") -> dict[str, object]:
    """A timeline table in the Chrome trace format (microseconds); processes are replicas, threads are lanes."""
    lanes = frame[frame["replica"] >= 0].drop_duplicates("lane").set_index("lane")["replica"]
    if "group" in frame:
        lanes[:] = 0
    events: list[dict[str, object]] = []
    for lane, rank in frame.drop_duplicates("lane")[["lane", "rank"]].itertuples(index=False):
        replica = int(lanes.get(lane, -1))
        name = {"name": f"rank {rank}"}
        events.append({"ph": "M", "name": "thread_name", "pid": replica, "tid": int(lane), "args": name})
    for row in frame.to_dict("records"):
        start = float(row["start_s"]) * 1e6
        group = row.get("group", "")
        events.append(
            {
                "ph": "X",
                "name": f"{row['pass']} {row['module']} {row['microbatch']}" if row["microbatch"] >= 0 else row["pass"],
                "cat": row["pass"],
                "pid": int(lanes.get(row["lane"], -1)),
                "tid": int(row["lane"]),
                "ts": start,
                "dur": float(row["end_s"]) * 1e6 - start,
                "args": {"stage": int(row["stage"]), "part": int(row["part"])} | ({"group": group} if group else {}),
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def parent_microbatches(program: Program, module: int) -> IntArray:
    """The microbatch of each chunk ``[chunks]``: its own, or the LLM's that it is a part of (arXiv:2504.14145)."""
    model = program.model
    shapes = program.shapes
    chunks = program.chunks[module]
    llm = program.chunks[model.llm_index]
    groups = [placed.copies for placed in program.layout.modules]
    if not model.modules[module].is_encoder or not len(chunks) or groups[module] != groups[model.llm_index]:
        return chunks.microbatch
    # Replica and LLM microbatch of every sample, as one number.
    most = 1 + int(llm.microbatch.max(initial=0))
    fed = np.full(len(shapes), -1)
    fed[llm.members] = (llm.replica * most + llm.microbatch).repeat(np.diff(llm.offsets))
    # Chunks are sorted by replica and microbatch; those of one microbatch differ in their part.
    begins = np.diff(chunks.replica, prepend=-1).astype(bool) | np.diff(chunks.microbatch, prepend=-1).astype(bool)
    batch = np.cumsum(begins) - 1
    goal = fed[model.modules[module].owners(shapes, chunks.members)]
    parent = goal[chunks.offsets[:-1][begins]]
    of_unit = batch.repeat(np.diff(chunks.offsets))
    if np.array_equal(goal, parent[of_unit]) and np.array_equal(parent // most, chunks.replica[begins]):
        return np.asarray(parent[batch] % most)
    return chunks.microbatch
