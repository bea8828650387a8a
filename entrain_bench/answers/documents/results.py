"""Iteration times of all strategies as text: ``results.md``, and the sentence that goes before all others."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from entrain_bench.answers.documents.headline import SIZES, ahead, job_rows, jobs_markdown, today_sweeps, with_today
from entrain_bench.answers.documents.mechanisms import gain_names, gains_by_name, mechanisms_section, sweeps
from entrain_bench.answers.documents.posterior import posterior_runs, posterior_sweeps, read_plan
from entrain_bench.answers.documents.tables import TABLES
from entrain_bench.answers.labels import FAMILIES, families, names
from entrain_bench.answers.posterior import Chance, chances, times_of
from entrain_bench.answers.sentences import headline_sentences, posterior_sentences
from entrain_bench.answers.tables import CASE, compared, interval_over_seeds, over_seeds, run_table, without_result
from entrain_bench.answers.text import count, markdown_table, seconds
from entrain_bench.base.files import write_atomically
from entrain_bench.records.metrics import BELIEVED
from entrain_bench.records.tables import GAP
from entrain_bench.run.study import Output, Study, SweepOverrides

# The text in brackets, and the column of runs whose mean it shows.
GAPS = {"gap": "gap_to_lower_bound", "gap_of_all": GAP}
# The headline's sweep.
SWEEP = "iteration_time"
AHEAD = "Fastest strategies"
TIMES = "Every strategy tuned with one budget, everything free"
POSTERIOR = "Under draws of the hardware constants"
# Template of the page: the text above the tables.
TEXT = Path(__file__).parents[1] / "templates" / "results.md"
PAGE = "results.md"
# Taken over by pages, as tables are: who is the fastest, and how far behind are published systems and frameworks.
HEADLINE = "tables/headline.md"
RIVALS = "tables/rivals.md"
# The table of estimated against simulated iteration times.
BELIEFS = "beliefs"
# Keys that make estimates wrong or actions noisy: runs with any of them have no exact estimate and are left out.
EXACT = ("belief_error", "belief_bias", "action_noise")
RUN = ["workload", "model", "cluster", "seed"]


def results_output() -> Output:
    """The document of all tables."""
    return Output(
        "results",
        _sweeps(),
        write_results,
        [PAGE],
        files=[HEADLINE, RIVALS, *(f"{TABLES}/{name}.md" for name in gain_names())],
        further=posterior_sweeps,
    )


def _sweeps() -> list[SweepOverrides]:
    return [(f"figure={SWEEP}",), *today_sweeps(f"figure={SWEEP}").values(), *sweeps()]


def write_results(study: Study) -> str:
    """Write ``results.md`` and sentences for other pages; returns missing runs, if any."""
    table = run_table(study.cells(f"figure={SWEEP}"), study.results, SIZES)
    draws = times_of(posterior_runs(study)) if read_plan().sweep == SWEEP else {}
    odds = {job: chances(times) for job, times in draws.items()}
    today = {
        label: run_table(study.cells(*sweep), study.results, SIZES)
        for label, sweep in today_sweeps(f"figure={SWEEP}").items()
    }
    rows = job_rows(with_today(table, today), draws)
    sure = posterior_sentences([*odds.values()], names(table, "strategy"))
    first, rivals = headline_sentences(ahead(rows))
    sentences = " ".join([first, rivals, *sure])
    seeds = count(table["seed"].nunique(), "seed")
    parts = [
        TEXT.read_text(),
        mechanisms_section(study),
        f"## {AHEAD}\n\n`figure={SWEEP}`, {seeds}. {sentences}\n",
        jobs_markdown(rows),
        f"## {TIMES}\n",
        results_markdown(table),
        *([posterior_markdown(table, odds)] if odds else []),
    ]
    values = {f"{TABLES}/{name}.md": text for name, text in gains_by_name(study).items()}
    for name, text in {HEADLINE: f"{first}\n", RIVALS: f"{rivals}\n", PAGE: "\n".join(parts), **values}.items():
        write_atomically(study.results.root / name, text.encode())
    return next(filter(None, (study.problem(*sweep) for sweep in _sweeps())), "")


def posterior_markdown(data: pd.DataFrame, odds: Mapping[tuple[str, str], Mapping[str, Chance]]) -> str:
    """A row for each strategy that is the fastest of its job in any draw; the run table gives the labels."""
    labels = {column: names(data, column) for column in CASE}
    rows = []
    for (model, workload), by_name in odds.items():
        for name, chance in by_name.items():
            if chance.num_fastest and chance.lead:
                job = f"{labels['model'][model]} {labels['workload'][workload]}"
                lead = f"{chance.lead.median:.2f}x ({chance.lead.low:.2f}x to {chance.lead.high:.2f}x)"
                rows.append([job, labels["strategy"][name], f"{chance.probability:.2f}", lead, f"{chance.num_draws}"])
    heading = ["model, workload", "strategy", "P(fastest)", "speedup over the runner-up", "draws"]
    return f"### {POSTERIOR}\n\n{markdown_table(heading, rows, right=heading[2:])}"


def results_markdown(data: pd.DataFrame) -> str:
    """A table for each family of strategies and the first strategy, followed by runs without a result."""
    first, *others = families(data).items()
    groups = [family for family in FAMILIES if any(theirs == family for _, theirs in others)]
    gaps = over_seeds(data, CASE, **{name: (column, "mean") for name, column in GAPS.items()})
    times = interval_over_seeds(data, CASE, "iteration_time_s").merge(gaps[[*CASE, *GAPS]], on=CASE)
    rows = {tuple(str(row[name]) for name in CASE): row for row in times.to_dict("records")}
    best = compared(data, CASE[:2])
    tables = []
    for family in groups or [first[1]]:
        heading = f"### {FAMILIES[family]}\n\n" if len(groups) > 1 else ""
        members = [first[0], *(name for name, theirs in others if theirs == family)]
        marks = {
            (*case, strategy): "**" if strategy in best[case].best else "*"
            for case, comparison in compared(data[data["strategy"].isin(members)], CASE[:2]).items()
            for strategy in comparison.best
        }
        cells = {case: _cell(row, marks.get(case, "")) for case, row in rows.items()}
        tables.append(heading + _table(data, cells, members))
    notes = "".join(f"- {sentence}\n" for sentence in without_result(data))
    return "\n".join([*tables, *filter(None, [notes])])


def _table(data: pd.DataFrame, cells: Mapping[tuple[str, ...], str], strategies: Sequence[str]) -> str:
    labels = {column: names(data, column) for column in CASE}
    rows = [
        [f"{labels['model'][model]} {labels['workload'][workload]}"]
        + [cells.get((model, workload, strategy), "") for strategy in strategies]
        for model, workload in data[CASE[:2]].drop_duplicates().astype(str).itertuples(index=False, name=None)
    ]
    heading = ["model, workload", *(labels["strategy"][name] for name in strategies)]
    return markdown_table(heading, rows, right=heading[1:])


def _cell(row: Mapping[Hashable, Any], mark: str) -> str:
    """Mean and interval between marks, gaps of the runs that have a result, and how many have none."""
    if not row["num_ok"]:
        return str(row["status"])
    text = seconds(row["iteration_time_s"])
    if row["num_ok"] > 1:
        text += f" ± {seconds((row['iteration_time_s_high'] - row['iteration_time_s_low']) / 2)}"
    lacking = row["num_runs"] - row["num_ok"]
    gaps = ", ".join(f"{100 * row[name]:.0f}%" for name in GAPS)
    note = f", {lacking} of {row['num_runs']} {row['status']}" if lacking else ""
    return f"{mark}{text}{mark} ({gaps}){note}"


def belief_errors(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of ``table_of`` whose estimates are exact, with the relative ``error`` of estimated times."""
    exact = runs["status"].eq("ok") & runs[BELIEVED].notna() & runs[[*EXACT]].eq(0).all(axis=1)
    return runs[exact].assign(error=lambda table: (table[BELIEVED] / table["iteration_time_s"] - 1).abs())


def beliefs_markdown(runs: pd.DataFrame) -> str:
    """A row for each strategy: number of runs, median and worst error, and the run with the worst."""
    rows = []
    for strategy, group in belief_errors(runs).groupby("strategy", sort=True):
        worst = group.sort_values([*RUN, "key"], kind="stable").sort_values("error", ascending=False, kind="stable")
        place = ", ".join(str(worst[name].iloc[0]) for name in RUN)
        errors = (f"{group['error'].median():.2%}", f"{worst['error'].iloc[0]:.1%}")
        rows.append([str(strategy), f"{len(group):,}", *errors, place])
    headings = ["strategy", "runs", "median", "worst", "worst run: workload, model, cluster, seed"]
    return markdown_table(headings, rows, right=["runs", "median", "worst"])
