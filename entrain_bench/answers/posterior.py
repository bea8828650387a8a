"""Rankings under unmeasured constants: P(fastest), and the 90% interval of a lead.

Published measurements leave the constants of a device open: ``experiments/posterior.csv`` holds draws of them (key
``constants``, 1 to 50). Each draw gives one time of every strategy, at a seed of its own, with plans made for it.
P(fastest) is the share of draws in which a strategy is the fastest. Its lead in a draw is the time of the runner-up
over its own. Figures, ``results.md`` and ``recommend`` all read this definition.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from entrain_bench.answers.comparison import TIME, Times, geometric_mean, with_result
from entrain_bench.base.arithmetic import decisive

# Share of the draws that an interval contains, cut equally at both ends.
COVERAGE = 0.9
# A lead counts if it is above 0 in at least this share of the draws, and over paired seeds.
SURE = 0.95
# The key of a run that chooses a draw; 0: the fitted constants.
KEY = "constants"


@dataclass(frozen=True, slots=True)
class Spread:
    """Values over draws: the median and the ends of the 90% interval, each a value that occurs."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """The spread of at least one value."""
        ordered = sorted(values)
        tail = (1 - COVERAGE) / 2
        places = (max(0, math.ceil(decisive(share * len(ordered))) - 1) for share in (0.5, tail, 1 - tail))
        return cls(*(ordered[place] for place in places))


@dataclass(frozen=True, slots=True)
class Chance:
    """A strategy of a job over draws; ``leads``: by draw, the time of the runner-up over its own."""

    num_fastest: int
    num_draws: int
    leads: Mapping[int, float]

    @property
    def probability(self) -> float:
        """P(fastest)."""
        return self.num_fastest / self.num_draws

    @property
    def lead(self) -> Spread | None:
        """Median and 90% interval of the lead; None without any."""
        return Spread.of(self.leads.values()) if self.leads else None


def chances[Name: Hashable](times: Mapping[Name, Times]) -> dict[Name, Chance]:
    """Return the chances of all strategies of a job by their times, the most probable first; empty without a result."""
    done = {name: with_result(by_draw) for name, by_draw in times.items()}
    draws = sorted({draw for by_draw in done.values() for draw in by_draw})
    winners = [_fastest(done, draw) for draw in draws]
    result = {}
    for name, by_draw in done.items() if draws else ():
        rivals = {
            draw: min((their[draw] for other, their in done.items() if other != name and draw in their), default=None)
            for draw in by_draw
        }
        leads = {draw: rival / by_draw[draw] for draw, rival in rivals.items() if rival is not None}
        result[name] = Chance(winners.count(name), len(draws), leads)
    return dict(sorted(result.items(), key=lambda item: -item[1].num_fastest))


def _fastest[Name: Hashable](done: Mapping[Name, Mapping[int, float]], draw: int) -> Name:
    there = {name: by_draw[draw] for name, by_draw in done.items() if draw in by_draw}
    return min(there, key=lambda name: decisive(there[name]))


def share_ahead(times: Times, others: Times) -> float | None:
    """P(lead > 0): share of the shared draws in which the first is faster; None without such a draw."""
    own, other = with_result(times), with_result(others)
    shared = [draw for draw in own if draw in other]
    return sum(decisive(own[draw]) < decisive(other[draw]) for draw in shared) / len(shared) if shared else None


def contenders[Name: Hashable](times: Mapping[Name, Times], limit: float) -> list[Name]:
    """The strategies that take at most ``limit`` times as long as the fastest in at least one draw, in their order.

    At least the two that come closest, so that the fastest has a rival.
    """
    done = {name: with_result(by_draw) for name, by_draw in times.items()}
    draws = {draw for by_draw in done.values() for draw in by_draw}
    least = {draw: min(by_draw[draw] for by_draw in done.values() if draw in by_draw) for draw in draws}
    closest = {
        name: decisive(min((by_draw[draw] / least[draw] for draw in sorted(by_draw)), default=math.inf))
        for name, by_draw in done.items()
    }
    first = sorted(closest, key=lambda name: closest[name])[:2]
    return [name for name in closest if closest[name] <= decisive(limit) or name in first]


def times_of(data: pd.DataFrame) -> dict[tuple[str, str], dict[str, Times]]:
    """Seconds per iteration by job (model, workload), strategy and draw, of those rows of a run table that have one."""
    times: dict[tuple[str, str], dict[str, dict[int, float | None]]] = {}
    rows: list[dict[Any, Any]] = data[data[KEY] > 0].to_dict("records") if KEY in data else []
    for row in rows:
        by_draw = times.setdefault((str(row["model"]), str(row["workload"])), {}).setdefault(str(row["strategy"]), {})
        by_draw[int(row[KEY])] = float(row[TIME]) if row["status"] == "ok" else None
    return {job: {**by_strategy} for job, by_strategy in times.items()}


def chances_by_job(data: pd.DataFrame) -> dict[tuple[str, str], dict[str, Chance]]:
    """``chances`` of the strategies of every job (model, workload) of a run table."""
    return {job: chances(times) for job, times in times_of(data).items()}


def with_chances(table: pd.DataFrame, odds: Mapping[tuple[str, str], Mapping[str, Chance]]) -> pd.DataFrame:
    """A table of jobs and strategies with P(fastest) and the ends of the lead, where there are any."""
    found = [odds.get((row["model"], row["workload"]), {}).get(row["strategy"]) for _, row in table.iterrows()]
    leads = [chance.lead if chance else None for chance in found]
    columns: dict[str, Any] = {"p_fastest": [chance.probability if chance else None for chance in found]}
    columns |= {f"lead_{end}": [getattr(lead, end, None) for lead in leads] for end in ("low", "high")}
    return table.assign(**columns)


@dataclass(frozen=True, slots=True)
class ChanceSummary:
    """The chances of a strategy over one or several jobs; the lead in a draw is the geometric mean over the jobs.

    ``probability`` is P(fastest), mean over all jobs; in ``num_sure`` of them it is at least ``COVERAGE``.
    """

    probability: float
    lead: Spread
    num_draws: int
    num_jobs: int
    num_leads: int
    num_sure: int

    @classmethod
    def of[Name: Hashable](cls, jobs: Sequence[Mapping[Name, Chance]], name: Name) -> ChanceSummary | None:
        """Sum up over the draws that all jobs with a lead have; None without such a draw."""
        chances = [job[name] for job in jobs if name in job]
        leads = [chance.leads for chance in chances if chance.leads]
        shared = sorted(set.intersection(*({*lead} for lead in leads))) if leads else []
        if not shared:
            return None
        return cls(
            math.fsum(chance.probability for chance in chances) / len(jobs),
            Spread.of([geometric_mean([lead[draw] for lead in leads]) for draw in shared]),
            chances[0].num_draws,
            len(jobs),
            len(leads),
            sum(decisive(chance.probability) >= COVERAGE for chance in chances),
        )


def rank_chances[Name: Hashable](jobs: Sequence[Mapping[Name, Chance]]) -> list[Name]:
    """Return the strategies of some jobs, the one that is the fastest in most draws first; equals keep their order."""
    won: dict[Name, float] = {}
    for name, chance in ((name, chance) for job in jobs for name, chance in job.items()):
        won[name] = won.get(name, 0.0) + chance.probability
    return sorted(won, key=lambda name: -decisive(won[name]))
