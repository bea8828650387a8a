"""Metrics of the user's that are newer than a record: computed from its kept timeline, or a reason to run it again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from entrain_bench.base.errors import UserError
from entrain_bench.program import Program
from entrain_bench.program.table import timeline_frame
from entrain_bench.program.timeline import Timeline
from entrain_bench.records.cached_layouts import CachedLayouts
from entrain_bench.records.cells import Cell
from entrain_bench.records.metrics import ExecutedIteration, metrics_in
from entrain_bench.records.records import Record, Results
from entrain_bench.run.experiment import Feed, plan_of, prepare

if TYPE_CHECKING:
    import pandas as pd

# Columns of a kept timeline that say which action a row is.
LABELS = ["lane", "module", "stage", "replica", "microbatch", "part", "pass"]
TIMES = ("start_s", "end_s", "comm_s", "transfer_wait_s")
MEMORY = ("memory_bytes", "memory_after_bytes")
OTHER_PROGRAM = "timeline: recorded for a different program than this configuration gives. Delete it to run it again"


def with_added_metrics(cell: Cell, record: Record, results: Results) -> Record:
    """Add the metrics of the cell's folder to a record, as far as its kept timeline has them, and store it.

    Raises:
        UserError: for metrics that cannot be imported or computed, and a timeline of another program.
    """
    missing = [one for one in metrics_in(cell.config_dir) if one.compute and one.name not in record.metrics]
    frame = results.timeline(record) if missing and record.status == "ok" else None
    if frame is None:
        return record
    setting = prepare(cell.config)
    layout = plan_of(setting, cell.config, CachedLayouts(results.root)).layout
    feed = Feed(setting, layout, cell.config.seed)
    program, host_time = feed.program(feed.batch(0))
    need = setting.shared.need(0, cell.config.seed)
    run = ExecutedIteration(_timeline(program, frame), setting.truth, host_time, need)
    values = {one.name: float(one.compute(run)) for one in missing if one.compute}
    # NaN: it needs memory, which not every executor states.
    values = {name: value for name, value in values.items() if np.isfinite(value)}
    first, *others = record.iterations
    remark = [f"{', '.join(values)}: of the first iteration, whose timeline was kept"] if others and values else []
    completed = replace(
        record,
        metrics={**record.metrics, **values},
        iterations=({**first, **values}, *others),
        remarks=(*record.remarks, *remark),
        # Whose code makes this record again.
        config_dir=cell.config_dir,
    )
    return results.write(completed, None)


def lacking(records: Iterable[Record], config_dir: str) -> dict[str, int]:
    """Return how many of the good runs have no value of each metric of a folder, for those that some run lacks."""
    good = [record for record in records if record.status == "ok"]
    counts = {one.name: sum(one.name not in record.metrics for record in good) for one in metrics_in(config_dir)}
    return {name: number for name, number in counts.items() if number}


def _timeline(program: Program, frame: pd.DataFrame) -> Timeline:
    """Return a kept timeline as the executor returned it; peaks of memory are NaN if the executor cannot tell."""
    if len(frame) != len(program.lane_actions):
        raise UserError(OTHER_PROGRAM)
    times = {name: np.zeros(program.num_actions) for name in TIMES}
    for name, values in times.items():
        values[program.lane_actions] = frame[name]
    memory = frame[[*MEMORY]].to_numpy().T if {*MEMORY} <= {*frame} else None
    peak = np.full(program.layout.num_lanes, np.nan)
    if memory is not None:
        np.fmax.at(peak, frame["lane"].to_numpy(), memory[0])
    timeline = Timeline(program, **times, peak_memory_bytes=peak, memory_bytes=memory)
    if not timeline_frame(timeline)[LABELS].equals(frame[LABELS]):
        raise UserError(OTHER_PROGRAM)
    return timeline
