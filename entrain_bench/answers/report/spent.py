"""Breakdown of iteration time of a case's runs."""

from __future__ import annotations

import math

from entrain_bench.answers.case import Case, SeedGroup
from entrain_bench.answers.comparison import TIME
from entrain_bench.records.time_shares import TIME_SHARES


def baseline_group(case: Case) -> SeedGroup | None:
    """The plainest variant of a case's baseline; None if the case has none."""
    groups = (group for group in case.groups.values() if group.strategy == case.baseline)
    return min(groups, key=lambda group: group.plainness, default=None)


def spent(group: SeedGroup) -> dict[str, float | None]:
    """Mean seconds of an iteration over seeds, by part; empty without a result."""
    times = group.values(TIME)
    idle = {seed: ratio * times[seed] for seed, ratio in group.values("bubble_ratio").items()}
    parts = {
        "iteration": times,
        "busy": {seed: times[seed] - part for seed, part in idle.items()},
        "idle": idle,
        "exposed comm.": group.values("exposed_comm_s"),
        "step": {seed: times[seed] - core for seed, core in group.values("core_time_s").items()},
        "bound": group.values("lower_bound_s"),
    }
    means = {name: sum(part.values()) / len(part) if part else None for name, part in parts.items()}
    return means if times else {}


def spent_by_class(group: SeedGroup) -> dict[str, float]:
    """Mean seconds of an iteration over seeds, by class of ``TIME_SHARES``; empty if the runs do not measure them."""
    times = group.values(TIME)
    shares = {name: group.values(name) for name in TIME_SHARES}
    if not times or any(share.keys() != times.keys() for share in shares.values()):
        return {}
    return {name: math.fsum(share[seed] * times[seed] for seed in times) / len(times) for name, share in shares.items()}
