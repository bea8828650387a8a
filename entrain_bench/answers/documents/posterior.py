"""Posterior runs under draws of the hardware constants (``experiments/posterior.yaml``), and ``posterior.csv``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

import pandas as pd
import yaml

from entrain_bench.answers.comparison import TIME, Comparison, Verdict
from entrain_bench.answers.documents.definition import overrides
from entrain_bench.answers.posterior import KEY, chances, contenders, times_of
from entrain_bench.answers.tables import JOB, MISSING, compared, run_table
from entrain_bench.base.errors import UserError
from entrain_bench.base.files import write_atomically
from entrain_bench.config.constants import speed_of
from entrain_bench.config.schema import RunConfig
from entrain_bench.config.tree import config_tree
from entrain_bench.records.cells import Cell
from entrain_bench.run.study import Output, Study, SweepOverrides

DEFINITION = "posterior.yaml"
FILE = "posterior.csv"
# Runs of the repository's reference; other code has other keys.
COMMITTED = Path("results/reference/table.parquet")

# Status of runs by key, and seconds per iteration of those with a result.
type Known = Mapping[str, tuple[str, float | None]]


@dataclass(frozen=True, slots=True)
class PosteriorPlan:
    """``experiments/posterior.yaml``, which explains the keys; limits of ``rounds`` are those of ``contenders``."""

    sweep: str
    within: float
    draws: int
    rounds: Mapping[int, float]
    action_noise: float

    @property
    def stages(self) -> Iterator[tuple[range, float]]:
        """Draws of every round, and the limit of who runs further ones; the last has none."""
        for first, last in pairwise([0, *sorted(self.rounds), self.draws]):
            yield range(first + 1, last + 1), self.rounds.get(last, float("inf"))


def read_plan() -> PosteriorPlan:
    """The suite's."""
    return PosteriorPlan(**yaml.safe_load((config_tree() / DEFINITION).read_text()))


@dataclass(frozen=True, slots=True)
class JobDraws:
    """Sweeps of a job under draws, and their run table with the column ``constants``; None if any run is missing."""

    draws: Sequence[SweepOverrides]
    table: pd.DataFrame | None


def committed_runs() -> Known:
    """Runs of the committed reference; none outside of the repository. Runs of other code have other keys."""
    if not COMMITTED.is_file():
        return {}
    rows = pd.read_parquet(COMMITTED, columns=["key", "status", TIME])
    return {key: (status, time if status == "ok" else None) for key, status, time in rows.itertuples(index=False)}


def jobs_of(study: Study, plan: PosteriorPlan, known: Known = MappingProxyType({})) -> list[JobDraws]:
    """The posterior runs of every job of the sweep; none if its results or the draws of its device are missing."""
    if _missing(study, plan):
        return []
    jobs = defaultdict[tuple[str, ...], list[Cell]](list)
    for cell in (cells := study.cells(f"figure={plan.sweep}")):
        jobs[str(cell.config.model["name"]), str(cell.config.workload["name"])].append(cell)
    comparisons = compared(run_table(cells, study.results), JOB)
    return [_job(study, plan, known, job, mine, _close(comparisons[job], plan.within)) for job, mine in jobs.items()]


def lacks_draws(config: RunConfig, number: int) -> str:
    """Why the device of a run has fewer draws; empty if it has all."""
    try:
        speed_of(replace(config, constants=number))
    except UserError as error:
        return str(error)
    return ""


def _missing(study: Study, plan: PosteriorPlan) -> str:
    """Why no posterior run can start; empty if all is there."""
    clusters = {str(cell.config.cluster): cell.config for cell in study.cells(f"figure={plan.sweep}")}
    lacking = filter(None, (lacks_draws(config, plan.draws) for config in clusters.values()))
    return next(lacking, "") or study.problem(f"figure={plan.sweep}")


def posterior_sweeps(study: Study) -> list[SweepOverrides]:
    """All sweeps that are known to be needed so far."""
    return [sweep for job in jobs_of(study, read_plan()) for sweep in job.draws]


def posterior_runs(study: Study) -> pd.DataFrame:
    """Return the run table of all complete jobs, with the column ``constants``; empty without any.

    Runs come from records or the committed reference.
    """
    tables = [job.table for job in jobs_of(study, read_plan(), committed_runs()) if job.table is not None]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def posterior_output() -> Output:
    """The table of chances; its sweeps follow from those of the plan's figure."""
    sweep = (f"figure={read_plan().sweep}",)
    return Output("posterior", [sweep], write_posterior, [FILE], further=posterior_sweeps, needs_further=True)


def write_posterior(study: Study) -> str:
    """Write ``posterior.csv``: a row for every strategy under draws; returns missing runs, if any."""
    jobs = jobs_of(study, read_plan())
    table = chances_table(posterior_runs(study))
    write_atomically(study.results.root / FILE, table.to_csv(index=False, float_format="%.6g").encode())
    lacking = sum(job.table is None for job in jobs)
    return _missing(study, read_plan()) or (f"{lacking} of {len(jobs)} jobs lack posterior runs" if lacking else "")


def chances_table(data: pd.DataFrame) -> pd.DataFrame:
    """A row for every job and strategy under draws: draws, runs, chance to be fastest, median and 90% of its lead."""
    rows = []
    for job, times in times_of(data).items():
        for strategy, chance in chances(times).items():
            ends = astuple(chance.lead) if chance.lead else (None,) * 3
            counts = (chance.num_draws, len(times[strategy]), chance.num_fastest, chance.probability)
            rows.append((*job, strategy, *counts, *ends))
    names = ["num_draws", "num_runs", "num_fastest", "probability", "lead", "lead_low", "lead_high"]
    return pd.DataFrame(rows, columns=[*JOB, "strategy", *names])


def _close(comparison: Comparison[str], limit: float) -> list[str]:
    """Return strategies without a failure within this ratio to the fastest's time; at least the first two."""
    standings = comparison.standings
    whole = [name for name in comparison.ranked if standings[name].verdict != Verdict.FAILED]
    close = [name for name in whole if (behind := standings[name].behind) is None or behind.mean <= limit]
    return close if len(close) > 1 else whole[:2]


def _job(
    study: Study, plan: PosteriorPlan, known: Known, job: tuple[str, ...], cells: Sequence[Cell], names: Sequence[str]
) -> JobDraws:
    """Rounds of draws as far as their results are there; none without a strategy that has all results."""
    if not names:
        return JobDraws((), pd.DataFrame())
    # Cells of a job differ in strategy and seed.
    common = [text for key, text in overrides(cells[0].overrides).items() if key not in ("strategy", "seed")]
    named = {str(cell.config.strategy["name"]): overrides(cell.overrides) for cell in cells}
    choices = {name: given.get("strategy", name) for name, given in named.items()}
    sweeps = list[SweepOverrides]()
    tables = list[pd.DataFrame]()
    for draws, limit in plan.stages:
        chosen = ",".join(choices[name].partition("=")[2] for name in names)
        noise = f"action_noise={plan.action_noise:g}"
        asked = [(f"strategy={chosen}", *common, f"seed={draw}", f"{KEY}={draw}", noise) for draw in draws]
        sweeps += asked
        table = _table(study, asked, known)
        if table is None:
            return JobDraws(sweeps, None)
        tables.append(table)
        times = times_of(pd.concat(tables, ignore_index=True))[job[0], job[1]]
        names = contenders({name: times[name] for name in names}, limit)
    return JobDraws(sweeps, pd.concat(tables, ignore_index=True))


def _table(study: Study, sweeps: Sequence[SweepOverrides], known: Known) -> pd.DataFrame | None:
    """The run table of sweeps with the column ``constants``; None if a run is neither finished nor known."""
    cells = [cell for sweep in sweeps for cell in study.cells(*sweep)]
    records = {cell.key: study.results.read(cell.key) for cell in cells}
    if any(not (record.finished if record else key in known) for key, record in records.items()):
        return None
    table = run_table(cells, study.results, {KEY: KEY})
    for place in table.index[table["status"] == MISSING]:
        table.loc[place, ["status", TIME]] = known[str(table.loc[place, "key"])]
    return table
