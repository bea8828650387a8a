"""Strategies over all workloads of the main setting, with intervals; and where their time goes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import pandas as pd

from entrain_bench.arithmetic import exp, log
from entrain_bench.records.statistics import Interval, ratio_interval
from entrain_bench.report.cases import Case, main_cases, times_by_seed
from entrain_bench.report.page import Block, Section, Table, Text, plain, row
from entrain_bench.report.words import TIMES, count, of_case, ratio, runs_link, seconds, status

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


@dataclass(frozen=True, slots=True)
class Rank:
    """A strategy over several cases.

    Attributes:
        label: what it is called.
        speedup: over the baseline, over all cases.
        least, greatest: the cases' own speed-ups.
        num_best: cases in which it is the fastest or as good.
    """

    label: str
    speedup: Interval
    least: float
    greatest: float
    num_best: int


def ranks(cases: Sequence[Case]) -> list[Rank]:
    """The strategies that have all results in all cases, the fastest first; none where the baseline has not."""
    times = [times_by_seed(case.runs) for case in cases]
    seeds = sorted(set.intersection(*({*table.index} for table in times)))
    found = []
    base, labels = cases[0].baseline, cases[0].labels
    complete = [name for name in labels if all(name in table and table[name].notna().all() for table in times)]
    for strategy in complete if base in complete and seeds else []:
        logs = [_logs(table.loc[seeds], base, strategy) for table in times]
        mean = ratio_interval([exp(sum(each) / len(each)) for each in zip(*logs, strict=True)], [1.0] * len(seeds))
        own = [exp(sum(each) / len(each)) for each in logs]
        num_best = sum(strategy in case.best for case in cases)
        found.append(Rank(labels[strategy], mean, min(own), max(own), num_best))
    return sorted(found, key=lambda rank: -rank.speedup.mean)


def _logs(times: pd.DataFrame, base: str, strategy: str) -> list[float]:
    """Logarithms of the speed-ups at every seed."""
    return [log(slow / fast) for slow, fast in zip(times[base].tolist(), times[strategy].tolist(), strict=True)]


def ranking(cases: Sequence[Case]) -> Section | None:
    """Strategies over the cases of the main setting; None if there is one case only."""
    # Where the baseline lacks a result, nothing can be compared with it.
    mine = [case for case in main_cases(cases) if not status(case, case.baseline)]
    found = ranks(mine) if len(mine) > 1 else []
    if len(found) < 2:
        return None
    rows = [
        row(
            rank.label,
            Text(ratio(rank.speedup), link="rerun"),
            f"{rank.least:.2f} to {rank.greatest:.2f}{TIMES}",
            f"{rank.num_best} of {len(mine)}",
        )
        for rank in found
    ]
    heading = ["strategy", "speed-up", "least to greatest", "fastest or as good"]
    left = sorted({*mine[0].labels.values()} - {rank.label for rank in found})
    note = [plain(f"Without a mean: {', '.join(left)}.")] if left else []
    words = HOW.format(base=mine[0].labels[mine[0].baseline])
    over = plain(f"Over {count(len(mine), 'case')}: {'; '.join(map(of_case, mine))}.")
    return Section("ranking", "Ranking over workloads", [Table(heading, rows, heading[1:]), *note, over, plain(words)])


def time_spent(cases: Sequence[Case]) -> Section:
    """Where an iteration's time goes under the baseline and the best strategy of every case."""
    heading = ["model", "workload", "strategy", "iteration", "busy", "idle", "exposed comm.", "step", "bound", "runs"]
    rows = [cells for case in main_cases(cases) for cells in _rows(case)]
    blocks: list[Block] = [Table(heading, rows, heading[3:]), plain(PARTS)]
    return Section("time", "Where the time goes", blocks)


def _rows(case: Case) -> Iterator[Sequence[Text]]:
    columns = ["iteration_time_s", "busy_s", "idle_s", "exposed_comm_s", "step_s", "lower_bound_s"]
    for strategy in _shown(case):
        values = case.summary[strategy]
        label = Text(case.labels[strategy], strong=strategy in case.best)
        yield row(case.model, case.workload, label, *(seconds(values[name]) for name in columns), runs_link(case))


def _shown(case: Case) -> Iterable[str]:
    """The baseline and the best strategy, if they have results."""
    names = dict.fromkeys([case.baseline, *case.best[:1]])
    return [name for name in names if case.summary[name]["num_ok"]]
