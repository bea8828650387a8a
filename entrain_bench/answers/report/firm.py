"""How firm the answer is: the same models and workloads under settings that differ from the main one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from entrain_bench.answers.answer import Answer
from entrain_bench.answers.case import Case
from entrain_bench.answers.comparison import with_result
from entrain_bench.answers.report.page import Line, Section, Table, Text, plain, row
from entrain_bench.answers.report.read import NAMED, setting_of
from entrain_bench.answers.statistics import kendall_tau, mean_interval
from entrain_bench.answers.text import NOTHING, count, ends

# Fewer strategies have no order to keep.
LEAST = 2
WORDS = (
    "Every row changes the setting as it says; strategies plan again under it. Held: in how many cases the strategy "
    "that is fastest in the main setting is still the fastest or as good. Rank correlation is Kendall's tau-b of the "
    "strategies' times with the main setting at the same seed, mean over cases and seeds with its 95% confidence "
    "interval over seeds: 1 is the same order. Only strategies, seeds and cases that ran in both are compared."
)


# Where a case's commands are on the page.
type Anchor = Callable[[Case], str]


def firmness(main: Answer, others: Answer, anchor: Anchor) -> Section | None:
    """A row a setting that has cases and strategies of the main one; None if there is none."""
    usual = {_named(case): case for case in main.cases}
    settings: dict[str, list[tuple[Case, Case]]] = {}
    for case in others.cases:
        if (other := usual.get(_named(case))) and len(_shared(other, case)[0]) >= LEAST and _shared(other, case)[1]:
            settings.setdefault(difference(other, case), []).append((other, case))
    rows = [_row(setting, pairs, anchor) for setting, pairs in settings.items()]
    heading = ["changed", "cases", "strategies", "held", "rank correlation"]
    return (
        Section("robustness", "How firm that is", [Table(heading, rows, heading[1:]), plain(WORDS)]) if rows else None
    )


def difference(usual: Case, case: Case) -> str:
    """How the setting of a case differs from that of another."""
    main = setting_of(usual)
    return " ".join(f"{heading}={text}" for heading, text in setting_of(case).items() if main[heading] != text)


def _row(setting: str, pairs: Sequence[tuple[Case, Case]], anchor: Anchor) -> Line:
    held, decided, taus = 0, 0, dict[int, list[float]]()
    for usual, case in pairs:
        if usual.best:
            decided += 1
            held += usual.best[0] in case.best
        names, seeds = _shared(usual, case)
        for seed in seeds:
            orders = ([_time(each, name, seed) for name in names] for each in (usual, case))
            taus.setdefault(seed, []).append(kendall_tau(*orders))
    tau = mean_interval([sum(each) / len(each) for _, each in sorted(taus.items())])
    interval = ends(tau, "{:.2f}".format)
    sizes = sorted(len(_shared(*pair)[0]) for pair in pairs)
    return row(
        Text(setting, link=anchor(pairs[0][1])),
        count(len(pairs), "case"),
        " to ".join(map(str, dict.fromkeys((sizes[0], sizes[-1])))),
        f"{held} of {decided}",
        f"{tau.mean:.2f}" + (f" ({interval})" if interval != NOTHING else ""),
    )


def _shared(usual: Case, case: Case) -> tuple[list[tuple[str, ...]], list[int]]:
    """The groups of both cases, and the seeds that all of them ran in both."""
    names = [own for own in usual.groups if own in case.groups]
    runs = [{*each.groups[own].runs} for each in (usual, case) for own in names]
    return names, sorted(set.intersection(*runs)) if runs else []


def _time(case: Case, own: tuple[str, ...], seed: int) -> float:
    """Seconds of a run; infinite for one without a result."""
    done: Mapping[int, float] = with_result(case.groups[own].times)
    return done.get(seed, float("inf"))


def _named(case: Case) -> tuple[str, ...]:
    return tuple(case.job[name] for name in NAMED)
