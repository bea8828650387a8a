"""How far one strategy leads the fastest of its rivals, job by job: a table with a ``leader`` as Markdown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from entrain_bench.answers.comparison import TIME, Standing, compare
from entrain_bench.answers.documents.table import Definition, stated_fields
from entrain_bench.answers.labels import names
from entrain_bench.answers.tables import run_table, times_by_seed, without_result
from entrain_bench.answers.text import seconds, speedup, times
from entrain_bench.base.arithmetic import exp, log
from entrain_bench.base.errors import require
from entrain_bench.run.study import Study, SweepOverrides

KEYS = ("title", "common", "corner", "rows", "leader", "strategies", "rivals")
# The strategy that leads; rivals are called by their label and their strategy.
LEADER = ("", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lead(Definition):
    """A table of the speedups of one strategy over the fastest of others; its rows are jobs.

    Attributes:
        leader: overrides of that strategy.
        strategies: names of the strategies that it is compared with.
        rivals: overrides that each of them gets, by a label; several labels are rivals of their own.
    """

    leader: SweepOverrides
    strategies: Sequence[str]
    rivals: Mapping[str, SweepOverrides]

    def of_leader(self, row: str) -> SweepOverrides:
        """The overrides of the leader's runs in a job."""
        return (*self.common, *self.rows[row], *self.leader)

    def of_rival(self, row: str, label: str) -> SweepOverrides:
        """The overrides of the runs of all strategies in a job, with what a label stands for."""
        return (f"strategy={','.join(self.strategies)}", *self.common, *self.rows[row], *self.rivals[label])

    @property
    def sweeps(self) -> list[SweepOverrides]:
        """The overrides of all runs."""
        rivals = [self.of_rival(row, label) for row in self.rows for label in self.rivals]
        return [*map(self.of_leader, self.rows), *rivals]


def parse_lead(name: str, values: Mapping[str, Any], families: Mapping[str, Sequence[str]]) -> Lead:
    """A lead from plain values; ``strategies`` is one of the families or a list of names, and rivals may be left out.

    Raises:
        UserError: for a key that is unknown or missing, and an unknown family.
    """
    stated = stated_fields(name, values, "rivals", KEYS)
    chosen = stated["strategies"]
    if isinstance(chosen, str):
        require(chosen in families, "strategies", chosen, f"a list, or one of {', '.join(families)}")
        chosen = families[chosen]
    return Lead(**stated | {"leader": tuple(stated["leader"]), "strategies": tuple(chosen)})


@dataclass(frozen=True, slots=True)
class _Row:
    """A job: its fastest rival, how that and the leader do, and the leader's mean gap to the bound of every layout."""

    rival: str
    other: Standing
    own: Standing
    gap: float


def lead_markdown(lead: Lead, study: Study) -> str:
    """Title, common overrides, a row a job, and below them all jobs together and runs without result."""
    found, notes = {}, []
    leader = ""
    for job in lead.rows:
        runs = run_table(study.cells(*lead.of_leader(job)), study.results)
        leader = names(runs, "strategy")[runs["strategy"].iloc[0]]
        rivals: dict[tuple[str, str], pd.DataFrame] = {}
        for label in lead.rivals:
            others = run_table(study.cells(*lead.of_rival(job, label)), study.results)
            called = names(others, "strategy")
            rivals |= {(label, called[str(name)]): mine for name, mine in others.groupby("strategy", sort=False)}
        found[job] = _row(runs, rivals)
        notes += [f"{job}: {sentence}" for sentence in without_result(runs)]
    heading = ["fastest of the others", "its s", f"{leader}, s", "times as fast (95%)", "gap"]
    rows = []
    for label, row in found.items():
        gap = "" if math.isnan(row.gap) else f"{100 * row.gap:.0f}%"
        gain = speedup(row.own.speedup) if row.own.speedup else ""
        rows.append([label, row.rival, _seconds(row.other), _seconds(row.own), gain, gap])
    gains = [row.own.speedup.mean for row in found.values() if row.own.speedup]
    if 1 < len(found) == len(gains):
        gaps = pd.Series([row.gap for row in found.values()])
        notes.insert(
            0,
            f"all rows: {times(exp(math.fsum(map(log, gains)) / len(gains)))} in the geometric mean, "
            f"{times(min(gains))} at least; gap {100 * gaps.median():.0f}% in the median, "
            f"{100 * gaps.max():.0f}% at most",
        )
    return lead.captioned(heading, rows, heading[1:], notes)


def _row(own: pd.DataFrame, rivals: Mapping[tuple[str, str], pd.DataFrame]) -> _Row:
    found = {LEADER: times_by_seed(own)} | {name: times_by_seed(runs) for name, runs in rivals.items()}
    fastest = compare({name: found[name] for name in rivals}, {}).ranked[0]
    pair = compare({name: found[name] for name in (LEADER, fastest)}, {LEADER: fastest})
    done = own[own["status"] == "ok"]
    gap = float((done[TIME] / done["cluster_bound_s"] - 1).mean())
    return _Row(", ".join(filter(None, reversed(fastest))), pair.standings[fastest], pair.standings[LEADER], gap)


def _seconds(standing: Standing) -> str:
    lacking = len(standing.times) - standing.num_ok
    failed = f"{lacking} of {len(standing.times)} without result" if lacking else ""
    return ", ".join(filter(None, [seconds(standing.time.mean) if standing.time else "", failed]))
