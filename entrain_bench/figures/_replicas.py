"""The replica that a figure shows."""

from __future__ import annotations

import pandas as pd

from entrain_bench.specs.module_layers import Role


def extreme_replica(actions: pd.DataFrame, column: str) -> pd.DataFrame:
    """The actions on the lanes of the LLM replica where a column of forwards and backwards is highest."""
    replicas = actions[(actions["side"] == Role.LLM) & (actions["replica"] >= 0)]["replica"].unique()
    frames = [replica_lanes(actions, replica) for replica in replicas]
    return max(frames, key=lambda frame: float(frame[frame["replica"] >= 0][column].max()))


def replica_lanes(actions: pd.DataFrame, replica: int) -> pd.DataFrame:
    """The actions, steps included, of the lanes that hold an LLM replica and of the encoder stages that feed it.

    Encoders on lanes of their own with another DP feed the LLM's replicas in order. Lanes are counted from 0, those
    with encoder work first.
    """
    work = actions[actions["replica"] >= 0]
    llm, encoder = (work[work["side"] == side] for side in (Role.LLM, Role.ENCODER))
    lanes = {*llm[llm["replica"] == replica]["lane"]}
    encoding = {*encoder["lane"]}
    if not lanes & encoding:
        feeding = replica * encoder["replica"].nunique() // llm["replica"].nunique()
        lanes |= {*encoder[encoder["replica"] == feeding]["lane"]}
    place = {lane: index for index, lane in enumerate(sorted(lanes, key=lambda lane: (lane not in encoding, lane)))}
    mine = actions[actions["lane"].isin(lanes)]
    return mine.assign(lane=mine["lane"].map(place)).reset_index(drop=True)
