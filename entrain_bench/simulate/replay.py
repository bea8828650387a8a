"""Replay measured durations on the simulated clock, to find time that computation and schedule do not explain."""

import numpy as np
import pandas as pd

from entrain_bench.base.errors import UserError
from entrain_bench.program import Program
from entrain_bench.program.table import timeline_frame
from entrain_bench.program.timeline import Timeline
from entrain_bench.simulate.engine import place_actions

LABELS = ["lane", "module", "stage", "replica", "microbatch", "part", "pass"]


def replay(program: Program, measured: pd.DataFrame) -> pd.DataFrame:
    """The timeline of a program with measured durations and free transfers; ``UserError`` for another program's."""
    duration_s = np.zeros(program.num_actions)
    if len(measured) == len(program.lane_actions):
        seconds = (measured["end_s"] - measured["start_s"]).to_numpy()
        np.maximum.at(duration_s, program.lane_actions, seconds)
    start, end, wait = place_actions(program, duration_s, np.zeros(len(program.dep_actions)))
    nothing = np.zeros(program.num_actions)
    replayed = timeline_frame(Timeline(program, start, end, nothing, wait, np.zeros(program.layout.num_lanes)))
    if not replayed[LABELS].equals(measured[LABELS].reset_index(drop=True)):
        what = "recorded for a different program than this configuration gives"
        raise UserError(f"timeline: {what}. Train again, or use the configuration of the recorded run")
    return replayed
