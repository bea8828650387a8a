"""Data of pictures of timelines (``timeline_frame``): one replica of a run, its lanes, and memory over time."""

from __future__ import annotations

import pandas as pd

from entrain_bench.answers.labels import names, spell
from entrain_bench.answers.tables import CASE
from entrain_bench.base.errors import UserError
from entrain_bench.specs.module_layers import Role

STEP = "Gradient sync and optimizer"
PASSES = {"forward": "forward", "backward": "backward", "weight": "weights"}
MICROBATCH = ["replica", "module", "microbatch"]
MEMORY = ["lane", "holds", "time_s", "bytes"]


def bars_of(runs: pd.DataFrame, actions: pd.DataFrame) -> pd.DataFrame:
    """The bars of every strategy of a table of runs, in its order, with their labels."""
    if actions.empty:
        raise UserError("no run of the sweep has a timeline")
    bars = {str(name): slowest_replica(rows) for name, rows in actions.groupby("strategy", sort=False)}
    parts = []
    for name, label in names(runs, "strategy").items():
        run = runs[runs["strategy"] == name].iloc[0]
        why = f"{run['status'] if run['status'] != 'ok' else 'no timeline kept'}: {run['reason']}"
        rows = bars[name] if name in bars else pd.DataFrame({"reason": [why]})
        parts.append(rows.assign(strategy=name, strategy_label=label))
    return pd.concat(parts, ignore_index=True)


def slowest_replica(actions: pd.DataFrame) -> pd.DataFrame:
    """The lanes of the replica whose last pass ends last; ``deferred``: a later part of an encoder's microbatch."""
    mine = extreme_replica(actions, "end_s")
    first = mine.groupby(MICROBATCH)["part"].transform("min")
    return mine.assign(deferred=(mine["side"] == Role.ENCODER) & (mine["part"] > first))


def kinds_of(actions: pd.DataFrame) -> list[str]:
    """Describe every action of ``slowest_replica`` in words."""
    return [
        f"{spell(module)} {PASSES[kind]}{', deferred' if later else ''}" if kind in PASSES else STEP
        for module, kind, later in actions[["module", "pass", "deferred"]].itertuples(index=False)
    ]


def has_groups(actions: pd.DataFrame) -> bool:
    """Whether groups of ranks of several widths run a run's actions."""
    return "group" in actions and bool(actions["group"].fillna("").ne("").any())


def degrees_of(group: str) -> str:
    """The degrees of a group named by ``timeline_frame``: ``cp4`` of ``ranks 4-7 cp4``, or nothing of ``rank 3``."""
    return " ".join(str(group).split()[2:])


def extreme_replica(actions: pd.DataFrame, column: str) -> pd.DataFrame:
    """The actions on the lanes of the LLM replica where a column of forwards and backwards is highest."""
    work = actions[(actions["side"] == Role.LLM) & (actions["replica"] >= 0)]
    replicas = work["replica"].unique()
    if has_groups(actions):
        lanes = work.groupby("replica", sort=False)["lane"].nunique()
        replicas = lanes[lanes == lanes.max()].index.to_numpy()
    frames = [replica_lanes(actions, replica) for replica in replicas]
    return max(frames, key=lambda frame: float(frame[frame["replica"] >= 0][column].max()))


def replica_lanes(actions: pd.DataFrame, replica: int) -> pd.DataFrame:
    """The actions of the lanes that hold an LLM replica and of the encoder stages that feed it.

    Encoders on lanes of their own with another DP feed the LLM's replicas in order. Lanes with encoder work come first.
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


def memory_of(runs: pd.DataFrame, actions: pd.DataFrame) -> pd.DataFrame:
    """Memory of every run's replica with the highest peak; a run without a timeline has a row with its ``reason``."""
    if "memory_bytes" not in actions:
        raise UserError("no timeline of the sweep has memory")
    lanes = {key: peak_replica(rows) for key, rows in actions.groupby(CASE, sort=False)}
    parts = []
    for run in runs.drop_duplicates(CASE).to_dict("records"):
        case = {name: run[name] for name in [*CASE, "strategy_label"] if name in run}
        why = pd.DataFrame({"reason": [f"{run['status']}: {run['reason']}"]})
        parts.append(lanes.get(tuple(run[name] for name in CASE), why).assign(**case))
    return pd.concat(parts, ignore_index=True)


def peak_replica(actions: pd.DataFrame) -> pd.DataFrame:
    """Memory over time on the lanes of the replica that holds the most: a row where it changes, and a last one."""
    mine = extreme_replica(actions, "memory_bytes")
    sides = mine[mine["replica"] >= 0].groupby("lane")["side"].unique()
    holds = sides.map(lambda held: "both" if len(held) > 1 else held[0])
    steps = memory_steps(mine)
    last = ~steps["lane"].duplicated(keep="last")
    changed = steps.groupby("lane")["bytes"].diff() != 0  # NaN, in the first row of a lane, differs
    return steps[changed | last].assign(holds=steps["lane"].map(holds))[MEMORY]


def memory_steps(frame: pd.DataFrame) -> pd.DataFrame:
    """Memory of a rank of each lane from ``time_s`` to the lane's next row, by lane and time (``timeline_frame``)."""
    lanes = frame[["lane", "rank"]]
    running = lanes.assign(time_s=frame["start_s"], bytes=frame["memory_bytes"])
    ended = lanes.assign(time_s=frame["end_s"], bytes=frame["memory_after_bytes"])
    # Entries of a lane follow each other in time: alternating them keeps the order where times are equal.
    return pd.concat([running, ended]).sort_index(kind="stable").reset_index(drop=True)
