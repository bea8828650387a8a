"""Gains of mechanisms, switched on alone and last, by class of job: ``experiments/figure/mechanisms.yaml``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import pandas as pd
import yaml

from entrain_bench.answers.comparison import TIME, geometric_mean
from entrain_bench.answers.statistics import ratio_interval
from entrain_bench.answers.tables import run_table, times_by_seed
from entrain_bench.answers.text import markdown_table
from entrain_bench.base.errors import unknown_choice
from entrain_bench.config.figures import row_label
from entrain_bench.config.tree import config_tree
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import Results
from entrain_bench.run.study import Study, SweepOverrides
from entrain_bench.specs.parse import parse

EXPERIMENT = "mechanisms"
SWITCHES = ("alone", "last")
NOBODY = "no framework that we found"


@dataclass(frozen=True, slots=True)
class Mechanism:
    """Variants without and with a mechanism, alone and last (empty: there is no such pair), and who has it today."""

    alone: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    runs_in: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Mechanisms:
    """Overrides of jobs and of variants, and the mechanisms, by label."""

    jobs: Mapping[str, SweepOverrides]
    variants: Mapping[str, SweepOverrides]
    mechanisms: Mapping[str, Mechanism]

    def label(self, job: str, variant: str) -> str:
        """The row of a job's variant in the figure's sweep."""
        return row_label((job, variant))


@cache
def read_mechanisms() -> Mechanisms:
    """The definition; ``UserError`` for a variant that there is none of."""
    figure = yaml.safe_load((config_tree() / "figure" / f"{EXPERIMENT}.yaml").read_text())["figure"]
    jobs, variants = ({label: tuple(texts) for label, texts in axis.items()} for axis in figure["rows"])
    mechanisms = {name: parse(Mechanism, values, name) for name, values in figure["mechanisms"].items()}
    for name, mechanism in mechanisms.items():
        for variant in (*mechanism.alone, *mechanism.last):
            if variant not in variants:
                raise unknown_choice(f"{EXPERIMENT}.yaml: {name}", variant, variants)
    return Mechanisms(jobs, variants, mechanisms)


def gains(cells: Mapping[str, Sequence[Cell]], results: Results) -> pd.DataFrame:
    """A row for each mechanism, switch (``alone``, ``last``) and job, from the cells of each row of the figure.

    ``gain`` is the time without over the time with it, minus 1, geometric mean over the seeds at which both succeeded;
    not a number where there are none, and ``reason`` says why. Pairs that a narrowed figure lacks have no row.
    """
    defined = read_mechanisms()
    tables = {label: run_table(mine, results) for label, mine in cells.items()}
    # Without any result the column is absent.
    tables = {label: table.reindex(columns=table.columns.union([TIME], sort=False)) for label, table in tables.items()}
    rows = []
    for name, mechanism in defined.mechanisms.items():
        for switch, pair in zip(SWITCHES, (mechanism.alone, mechanism.last), strict=True):
            for job in defined.jobs if pair else ():
                labels = [defined.label(job, variant) for variant in pair]
                if not {*labels} <= tables.keys():
                    continue
                without, with_it = (tables[label] for label in labels)
                other, mine = times_by_seed(without), times_by_seed(with_it)
                both = [(before, time) for seed, time in mine.items() if time and (before := other.get(seed))]
                ratio = ratio_interval([one for one, _ in both], [two for _, two in both]).mean if both else math.nan
                reasons = pd.concat([without, with_it]).query("status != 'ok'")["reason"]
                failed = next(iter(reasons), "")
                rows.append((name, switch, job, ratio - 1, len(both), failed, "; ".join(mechanism.runs_in)))
    columns = ["mechanism", "switched", "job", "gain", "num_seeds", "reason", "runs_in"]
    return pd.DataFrame(rows, columns=columns)


def sweeps() -> list[SweepOverrides]:
    """The sweeps of all jobs and variants."""
    return [*_labelled_sweeps().values()]


def mechanisms_section(study: Study) -> str:
    """The section of a page: the gains by job class, and which framework has each mechanism."""
    table = gains({label: study.cells(*sweep) for label, sweep in _labelled_sweeps().items()}, study.results)
    rows = []
    lacking = []
    for (name, switch), mine in table.groupby(["mechanism", "switched"], sort=False):
        by_job = mine.set_index("job")["gain"]
        rows.append([str(name), str(switch), _over_jobs(by_job), mine["runs_in"].iloc[0] or NOBODY])
        if missing := [str(job) for job in by_job.index[by_job.isna()]]:
            lacking.append(f"- {name}, {switch}: no result with or without it on {', '.join(missing)}.\n")
    heading = ["mechanism", "switched on", "gain (range over jobs)", "available in"]
    text = (
        "Time without a mechanism over the time with it, minus 1: geometric mean over jobs, and the range. `alone`: on "
        "a simple strategy, mostly Megatron with samples in arrival order. `last`: on top of the others, mostly of "
        f"`strategy=braid`. Layouts are tuned with one budget; options are fixed. Definitions: `figure={EXPERIMENT}`."
    )
    notes = "\n" + "".join(lacking) if lacking else ""
    return f"## Gain of each mechanism\n\n{text}\n\n{markdown_table(heading, rows, right=heading[2:3])}{notes}"


def gain_name(mechanism: str, switch: str) -> str:
    """Return the name under which sentences of pages take a gain."""
    return f"gain_{re.sub(r'[^a-z0-9]+', '_', mechanism.lower())}_{switch}"


def gain_names() -> list[str]:
    """Names of all gains, alone and last."""
    return [
        gain_name(name, switch)
        for name, mechanism in read_mechanisms().mechanisms.items()
        for switch, pair in zip(SWITCHES, (mechanism.alone, mechanism.last), strict=True)
        if pair
    ]


def gains_by_name(study: Study) -> dict[str, str]:
    """The mean gain of each mechanism as a text, by ``gain_name``."""
    table = gains({label: study.cells(*sweep) for label, sweep in _labelled_sweeps().items()}, study.results)
    return {
        gain_name(str(name), str(switch)): f"{100 * mean_gain(mine['gain']):.0f}%"
        for (name, switch), mine in table.groupby(["mechanism", "switched"], sort=False)
    }


def mean_gain(by_job: pd.Series) -> float:
    """Geometric mean of the gains of those jobs that have one, not a number if none has."""
    ratios = [1 + float(gain) for gain in by_job.dropna()]
    return geometric_mean(ratios) - 1 if ratios else math.nan


def _over_jobs(by_job: pd.Series) -> str:
    """The mean gain over jobs, and the range."""
    found = by_job.dropna()
    if found.empty:
        return "n/a"
    return f"{100 * mean_gain(found):+.1f}% ({100 * found.min():+.1f}% to {100 * found.max():+.1f}%)"


def _labelled_sweeps() -> dict[str, SweepOverrides]:
    defined = read_mechanisms()
    return {
        defined.label(job, variant): (f"figure={EXPERIMENT}", *of_job, *of_variant)
        for job, of_job in defined.jobs.items()
        for variant, of_variant in defined.variants.items()
    }
