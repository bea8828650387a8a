"""Strategies over all workloads of the main setting, with intervals; and where their time goes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pandas as pd

from entrain_bench.answers.comparison import TIME, baseline_of, overall
from entrain_bench.answers.labels import orders
from entrain_bench.answers.report.cases import Case, main_cases
from entrain_bench.answers.report.page import Block, Section, Table, Text, plain, row
from entrain_bench.answers.report.words import TIMES, count, of_case, ratio, runs_link, seconds

HOW = (
    "Speed-up over {base}: geometric mean over models and workloads at every seed, then over seeds with its 95% "
    "interval, which says what other samples of the same data would change, not other data: see the least and the "
    "greatest. Strategies that lack a result have no mean, and cases in which {base} lacks one are left out."
)
PARTS = (
    "Means over seeds, in seconds of an iteration. Busy and idle are a GPU's average share: together they are the "
    "iteration; idle is bubble_ratio of it, and busy includes communication inside forwards and backwards. Exposed "
    "communication (exposed_comm_s) is what a GPU waits for inside either. Step is what lies before the first forward "
    "and after the last backward (iteration_time_s - core_time_s). The bound (lower_bound_s) holds for the layout that "
    "the strategy chose."
)


def ranking(cases: Sequence[Case]) -> Section | None:
    """Strategies over the cases of the main setting; None if there is one case only."""
    every = main_cases(cases)
    base = baseline_of(orders(pd.concat([case.runs for case in every])))
    mine = [case for case in every if case.baseline == base and case.comparison.comparable]
    found = overall([case.comparison for case in mine]) if len(mine) > 1 else {}
    if len(found) < 2:
        return None
    labels = mine[0].labels
    rows = [
        row(
            labels[strategy],
            Text(ratio(rank.speedup), link="rerun"),
            f"{rank.least:.2f} to {rank.greatest:.2f}{TIMES}",
            f"{rank.num_best} of {len(mine)}",
        )
        for strategy, rank in found.items()
    ]
    heading = ["strategy", "speed-up", "least to greatest", "fastest or as good"]
    left = sorted(label for strategy, label in labels.items() if strategy not in found)
    note = [plain(f"Without a mean: {', '.join(left)}.")] if left else []
    words = HOW.format(base=labels[base])
    over = plain(f"Over {count(len(mine), 'case')}: {'; '.join(map(of_case, mine))}.")
    return Section("ranking", "Ranking over workloads", [Table(heading, rows, heading[1:]), *note, over, plain(words)])


def time_spent(cases: Sequence[Case]) -> Section:
    """Where an iteration's time goes under the baseline and the best strategy of every case."""
    parts = [f"{name} (s)" for name in ("iteration", "busy", "idle", "exposed comm.", "step", "bound")]
    heading = ["model", "workload", "strategy", *parts, "runs"]
    rows = [cells for case in main_cases(cases) for cells in _rows(case)]
    blocks: list[Block] = [Table(heading, rows, heading[3:]), plain(PARTS)]
    return Section("time", "Where the time goes", blocks)


def _rows(case: Case) -> Iterator[Sequence[Text]]:
    columns = [TIME, "busy_s", "idle_s", "exposed_comm_s", "step_s", "lower_bound_s"]
    for strategy in _shown(case):
        values = case.summary[strategy]
        label = Text(case.labels[strategy], strong=strategy in case.best)
        yield row(case.model, case.workload, label, *(seconds(values[name]) for name in columns), runs_link(case))


def _shown(case: Case) -> Iterable[str]:
    """The baseline and the best strategy, if they have results."""
    names = dict.fromkeys([case.baseline, *case.best[:1]])
    return [name for name in names if case.summary[name]["num_ok"]]
