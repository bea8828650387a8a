"""The page of some runs, and of what else is known: a pure function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import pandas as pd

from entrain_bench.answers.labels import consecutive, in_order
from entrain_bench.answers.report.answer import answer, elsewhere
from entrain_bench.answers.report.cases import Case, cases_of, main_cases
from entrain_bench.answers.report.evidence import claims_section, environment, failures, fidelity_section, rerun
from entrain_bench.answers.report.firm import firmness
from entrain_bench.answers.report.page import Image, Page, Section
from entrain_bench.answers.report.ranking import ranking, time_spent
from entrain_bench.answers.report.runs import compared
from entrain_bench.answers.report.words import listing

TITLE = "Which balancing strategy to use"


@dataclass(frozen=True, slots=True)
class Material:
    """What a page is made of.

    Attributes:
        rows: one row a run, as ``read.read_runs`` returns them.
        usual: settings that nobody has to name, by column.
        version: of the suite.
        num_older: runs of older code that are left out.
        claims: the rows of ``claims.csv``; None where there are none.
        fidelity: the rows of ``fidelity.csv``; None where there are none.
        samples: lines on workloads that were not taken as they are.
    """

    rows: pd.DataFrame
    usual: Mapping[str, str]
    version: str
    num_older: int = 0
    claims: pd.DataFrame | None = None
    fidelity: pd.DataFrame | None = None
    samples: Sequence[str] = ()


class Pictures(Protocol):
    """Who draws, as PNG."""

    def iteration_time(self, runs: pd.DataFrame) -> bytes:
        """Iteration times of a row a run."""
        ...

    def fidelity(self, rows: pd.DataFrame) -> bytes:
        """Predicted against measured, of the rows of one prediction."""
        ...


def page_of(material: Material, pictures: Pictures | None = None) -> Page:
    """The page of runs of which at least one has a result; drawing pictures takes most of the time."""
    runs = compared(material.rows, material.usual)
    cases = cases_of(runs.table)
    sections = [
        _and(answer(cases, runs.main), _iteration_times(main_cases(cases), pictures) if pictures else None),
        ranking(cases),
        time_spent(cases),
        firmness(cases),
        elsewhere(cases),
        failures(cases),
        claims_section(material.claims) if material.claims is not None else None,
        _measured(material.fidelity, pictures) if material.fidelity is not None else None,
        environment(
            runs.table, material.version, material.num_older + runs.num_older, runs.num_variants, material.samples
        ),
        rerun(cases),
    ]
    return Page(TITLE, [section for section in sections if section])


def _and(section: Section, image: Image | None) -> Section:
    return Section(section.anchor, section.title, [*section.blocks, *([image] if image else [])])


def _measured(rows: pd.DataFrame, pictures: Pictures | None) -> Section:
    return _and(fidelity_section(rows), _fidelity(rows, pictures) if pictures else None)


def _iteration_times(cases: Sequence[Case], pictures: Pictures) -> Image:
    data = in_order(pd.concat([case.runs for case in cases], ignore_index=True))
    seeds = consecutive(sorted(data["seed"].unique().tolist()))
    sources = listing(sorted({*data["cost_source"].dropna()}))
    caption = (
        f"Iteration time on {listing(sorted({case.cluster for case in cases}))}, seeds {seeds}, costs {sources}. Bars "
        "are means over seeds, whiskers their 95% intervals, ticks the lower bound of each layout; numbers are the "
        "speed-up over the first strategy, pale where its interval includes 1. Same runs as the table above."
    )
    return Image(pictures.iteration_time(data), caption)


def _fidelity(rows: pd.DataFrame, pictures: Pictures) -> Image:
    own = rows[rows["prediction"] == rows["prediction"].iloc[-1]]
    caption = "Predicted against measured iteration times, gains over each other, and errors by quantity."
    return Image(pictures.fidelity(own), caption)
