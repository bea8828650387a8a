"""Which strategy is fastest at a job, by how much over the baseline, and what has no result; in words, too."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from entrain_bench.arithmetic import decisive
from entrain_bench.records.cases import NAMES, Case
from entrain_bench.records.statistics import Interval, mean_interval, not_worse, ratio_interval

TIME = "iteration_time_s"
# The strategy that others are compared with where it is among them.
BASELINE = "megatron"
# So many names of strategies that are not told apart are enough; the table has them all.
MAX_NAMES = 4
PAST = {"failed": ("failed", "failed"), "skipped": ("was skipped", "were skipped")}


@dataclass(frozen=True, slots=True)
class Row:
    """What came out of a case.

    Attributes:
        case: its labels and runs.
        time: seconds an iteration; None if no run succeeded.
        speedup: how many times as fast as the baseline with the same other labels, over the seeds at which both
            succeeded; None without such a seed.
        best: whether nothing else is significantly faster at this job; false where there is nothing else.
    """

    case: Case
    time: Interval | None
    speedup: Interval | None
    best: bool


def ranked(cases: Sequence[Case]) -> list[list[Row]]:
    """The cases of every job, fastest first; jobs by workload and model, then in order of appearance."""
    jobs: dict[tuple[str, ...], list[Case]] = {}
    for case in cases:
        jobs.setdefault(tuple(case.job.values()), []).append(case)
    return [_rows(job) for job in sorted(jobs.values(), key=lambda job: (job[0].job["workload"], job[0].job["model"]))]


def varying(rows: Sequence[Row]) -> list[str]:
    """Headings of the labels that rows do not have in common."""
    first = rows[0].case.labels
    return [heading for heading in first if any(row.case.labels[heading] != first[heading] for row in rows)]


def name_of(labels: Mapping[str, str], headings: Sequence[str]) -> str:
    """Some labels as one text: names alone, other labels with their heading."""
    return " ".join(labels[each] if each in NAMES else f"{each}={labels[each]}" for each in headings if each in labels)


def winners(blocks: Sequence[Sequence[Row]]) -> str:
    """Who is fastest at which jobs, in one sentence; empty where there is nothing to compare."""
    headings = varying([row for block in blocks for row in block])
    decided: dict[tuple[str, ...], list[list[Row]]] = {}
    for block in blocks:
        if best := [row for row in block if row.best]:
            who = [each for each in headings if each not in best[0].case.job]
            decided.setdefault(tuple(sorted(name_of(row.case.labels, who) for row in best)), []).append(best)
    parts = [
        f"{_either(names)}{_places(won, headings, len(blocks))}{_gain(names, won)}" for names, won in decided.items()
    ]
    alone = all(len(row.case.runs) == 1 for won in decided.values() for best in won for row in best)
    note = ". With one seed, chance is not ruled out" if alone else ""
    return f"Fastest: {'; '.join(parts)}{note}." if parts else ""


def problems(rows: Sequence[Row], headings: Sequence[str]) -> Iterator[str]:
    """Lines on what has no result: how many runs, at which seeds, why; one for all alike, if labels name them."""
    groups: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        for status in PAST:
            if lost := [each for each in row.case.runs.values() if each.status == status]:
                groups.setdefault((status, lost[0].reason, len(lost)), []).append(row)
    for (status, reason, _), alike in groups.items():
        shared = [each for each in headings if len({row.case.labels[each] for row in alike}) == 1]
        named = [row for row in rows if all(row.case.labels[each] == alike[0].case.labels[each] for each in shared)]
        for part, names in [(alike, shared)] if named == alike else [([row], headings) for row in alike]:
            runs = [(seed, record.status) for row in part for seed, record in row.case.runs.items()]
            seeds = [seed for seed, found in runs if found == status]
            name = name_of(part[0].case.labels, names) or "all"
            yield f"{status}: {name}, {len(seeds)} of {len(runs)} runs ({spell_seeds(seeds)}): {reason}"


def losses(rows: Sequence[Row]) -> str:
    """How many of all runs have no result, and at which seeds, in one sentence; empty if all have."""
    runs = [(seed, record.status) for row in rows for seed, record in row.case.runs.items()]
    parts = []
    for status, (one, several) in PAST.items():
        seeds = [seed for seed, found in runs if found == status]
        if seeds:
            parts.append(f"{len(seeds)} {one if len(seeds) == 1 else several} ({spell_seeds(seeds)})")
    return f"Of {len(runs)} run{'s' if len(runs) > 1 else ''} {' and '.join(parts)}." if parts else ""


def spell_seeds(seeds: Sequence[int]) -> str:
    """Seeds in words, each once: ``seed 3``, ``seeds 0, 2``, ``seeds 0 to 7``."""
    found = sorted({*seeds})
    if len(found) > 2 and found[-1] - found[0] == len(found) - 1:
        return f"seeds {found[0]} to {found[-1]}"
    return f"seed{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}"


def _rows(cases: Sequence[Case]) -> list[Row]:
    """The rows of one job, fastest first; what has no result comes last."""
    by_labels = {tuple(case.labels.values()): case for case in cases}
    best, rows = _best(cases), []
    for index, case in enumerate(cases):
        times = [*case.values(TIME).values()]
        baseline = by_labels.get(tuple({**case.labels, "strategy": BASELINE}.values()))
        time = mean_interval(times) if times else None
        rows.append(Row(case, time, _speedup(case, baseline) if baseline else None, index in best))
    return sorted(rows, key=lambda row: decisive(row.time.mean) if row.time else math.inf)


def _best(cases: Sequence[Case]) -> set[int]:
    """Places of the cases than which none is significantly faster, among those with a result at all of the seeds."""
    seeds = {seed for case in cases for seed in case.runs}
    times = {str(index): case.values(TIME) for index, case in enumerate(cases)}
    whole = {index: [*each.values()] for index, each in times.items() if {*each} == seeds}
    return {int(index) for index in not_worse(whole)} if whole and len(cases) > 1 else set()


def _speedup(case: Case, baseline: Case) -> Interval | None:
    own, other = case.values(TIME), baseline.values(TIME)
    seeds = [seed for seed in own if seed in other]
    return ratio_interval([other[seed] for seed in seeds], [own[seed] for seed in seeds]) if seeds else None


def _either(names: Sequence[str]) -> str:
    """Names of whom no one is told apart from the others."""
    left = len(names) - MAX_NAMES
    return " or ".join([*names[:MAX_NAMES], *([f"{left} more"] if left > 0 else [])])


def _places(won: Sequence[Sequence[Row]], headings: Sequence[str], num_jobs: int) -> str:
    """The jobs of some rows: by name, or that they are all."""
    if len(won) == num_jobs:
        return " everywhere" if num_jobs > 1 else ""
    return " on " + ", ".join(name_of(best[0].case.job, headings) for best in won)


def _gain(names: Sequence[str], won: Sequence[Sequence[Row]]) -> str:
    """From where to where the speed-ups of a sole winner are; that several are not told apart."""
    if len(names) > 1:
        return " (no significant difference)"
    gains = [row.speedup.mean for best in won for row in best if row.speedup]
    if not gains or all(row.case.labels["strategy"] == BASELINE for best in won for row in best):
        return ""
    least, most = (f"{value:.2f}x" for value in (min(gains), max(gains)))
    return f" ({least if least == most else f'{least} to {most}'} {BASELINE})"
