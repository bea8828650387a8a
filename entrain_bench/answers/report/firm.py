"""How firm the answer is: the same models and workloads under settings that differ from the main one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd

from entrain_bench.answers.rankings import ALL, rankings
from entrain_bench.answers.report.cases import Case, main_cases
from entrain_bench.answers.report.page import Section, Table, Text, plain, row
from entrain_bench.answers.report.words import count

# Fewer strategies have no order to keep.
LEAST = 2
WORDS = (
    "Every row changes the setting as it says; strategies plan anew under it. Held: in how many cases the strategy "
    "that is fastest in the main setting is still the fastest or not significantly slower. Rank correlation is "
    "Kendall's tau-b of the strategies' times with the main setting at the same seed, mean over cases and seeds with "
    "its 95% interval: 1 is the same order. Only strategies and cases that ran in both are compared."
)


def firmness(cases: Sequence[Case]) -> Section | None:
    """A row a setting that has cases and strategies of the main one; None if there is none."""
    rows = [cells for setting in _others(cases) if (cells := _row(setting, cases))]
    if not rows:
        return None
    heading = ["changed", "cases", "strategies", "held", "rank correlation"]
    return Section("robustness", "How firm that is", [Table(heading, rows, heading[1:]), plain(WORDS)])


def _others(cases: Sequence[Case]) -> list[str]:
    return list(dict.fromkeys(case.setting for case in cases if case.setting))


def _row(setting: str, cases: Sequence[Case]) -> Sequence[Text] | None:
    pairs = [*_shared(setting, cases)]
    if not pairs:
        return None
    data = pd.concat([pd.concat([usual.assign(row="main"), changed.assign(row="")]) for usual, changed, _ in pairs])
    data = data.sort_values("row", key=lambda rows: rows.ne("main"), kind="stable")
    # The sweep's own order of models and workloads; strategies differ between cases.
    table = rankings(data)
    mine = table[(table["row"] == "") & (table["workload"] != ALL)]
    tau = table[(table["row"] == "") & (table["workload"] == ALL)].iloc[0]
    strategies = sorted({len({*usual["strategy"]}) for usual, _, _ in pairs})
    interval = f" ({tau['tau_low']:.2f} to {tau['tau_high']:.2f})" if data["seed"].nunique() > 1 else ""
    return row(
        Text(setting, link=pairs[0][2].anchor),
        count(len(mine), "case"),
        " to ".join(map(str, dict.fromkeys((strategies[0], strategies[-1])))),
        f"{int(mine['firm'].sum())} of {len(mine)}",
        f"{tau['tau']:.2f}{interval}",
    )


def _shared(setting: str, cases: Sequence[Case]) -> Iterator[tuple[pd.DataFrame, pd.DataFrame, Case]]:
    """The runs of the main setting and of another of every case that both have, at strategies and seeds of both."""
    main = {_place(case): case for case in main_cases(cases)}
    for case in cases:
        usual = main.get(_place(case))
        if case.setting == setting and usual is not None:
            strategies, seeds = {*usual.labels} & {*case.labels}, {*usual.seeds} & {*case.seeds}
            if len(strategies) >= LEAST and seeds:
                one, other = (
                    each.runs[each.runs["strategy"].isin(strategies) & each.runs["seed"].isin(seeds)]
                    for each in (usual, case)
                )
                yield one, other, case


def _place(case: Case) -> tuple[str, str]:
    return case.model, case.workload
