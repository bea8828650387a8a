"""Comparisons in words: who is fastest where, by how much over the baseline, and what has no result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from entrain_bench.answers.cases import Case, Row
from entrain_bench.answers.contenders import NAMES
from entrain_bench.records.time_shares import TIME_SHARES

# So many names of strategies that are not told apart are enough; the table has them all.
MAX_NAMES = 4
# What the classes of GPU time are called.
TIME_WORDS = dict(
    zip(
        TIME_SHARES,
        (
            "ideal work",
            "slower computation: packs, splits",
            "recomputation",
            "communication",
            "unequal stages",
            "unequal replicas",
            "unequal microbatches, order",
            "pipeline fill and drain",
            "step: gradients, optimizer, weights",
            "unused GPUs",
        ),
        strict=True,
    )
)
PAST = {"failed": ("failed", "failed"), "skipped": ("was skipped", "were skipped")}


def varying(rows: Sequence[Row]) -> list[str]:
    """Headings of the labels that rows do not have in common."""
    first = rows[0].contender.labels
    return [heading for heading in first if any(row.contender.labels[heading] != first[heading] for row in rows)]


def name_of(labels: Mapping[str, str], headings: Sequence[str]) -> str:
    """Some labels as one text: names alone, other labels with their heading."""
    return " ".join(labels[each] if each in NAMES else f"{each}={labels[each]}" for each in headings if each in labels)


def winners(cases: Sequence[Case]) -> str:
    """Who is fastest at which jobs, in one sentence; empty where there is nothing to compare."""
    headings = varying([row for case in cases for row in case.rows])
    decided: dict[tuple[str, ...], list[Case]] = {}
    for case in cases:
        if best := [row.contender for row in case.rows if row.best]:
            who = [each for each in headings if each not in case.job]
            decided.setdefault(tuple(sorted(name_of(each.labels, who) for each in best)), []).append(case)
    parts = [
        f"{_either(names)}{_places(won, headings, len(cases))}{_gain(names, won)}" for names, won in decided.items()
    ]
    alone = all(len(case.comparison.seeds) == 1 for won in decided.values() for case in won)
    note = ". With one seed, chance is not ruled out" if alone else ""
    return f"Fastest: {'; '.join(parts)}{note}." if parts else ""


def problems(rows: Sequence[Row], headings: Sequence[str]) -> Iterator[str]:
    """Lines on what has no result: how many runs, at which seeds, why; one for all alike, if labels name them."""
    groups: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        for status in PAST:
            if lost := [each for each in row.contender.runs.values() if each.status == status]:
                groups.setdefault((status, lost[0].reason, len(lost)), []).append(row)
    for (status, reason, _), alike in groups.items():
        shared = [each for each in headings if len({row.contender.labels[each] for row in alike}) == 1]
        named = [
            row for row in rows if all(row.contender.labels[each] == alike[0].contender.labels[each] for each in shared)
        ]
        for part, names in [(alike, shared)] if named == alike else [([row], headings) for row in alike]:
            runs = [(seed, record.status) for row in part for seed, record in row.contender.runs.items()]
            seeds = [seed for seed, found in runs if found == status]
            name = name_of(part[0].contender.labels, names) or "all"
            yield f"{status}: {name}, {len(seeds)} of {len(runs)} runs ({spell_seeds(seeds)}): {reason}"


def losses(rows: Sequence[Row]) -> str:
    """How many of all runs have no result, and at which seeds, in one sentence; empty if all have."""
    runs = [(seed, record.status) for row in rows for seed, record in row.contender.runs.items()]
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


def _either(names: Sequence[str]) -> str:
    """Names of whom no one is told apart from the others."""
    left = len(names) - MAX_NAMES
    return " or ".join([*names[:MAX_NAMES], *([f"{left} more"] if left > 0 else [])])


def _places(won: Sequence[Case], headings: Sequence[str], num_cases: int) -> str:
    """Where some cases are: by name, or that they are all."""
    if len(won) == num_cases:
        return " everywhere" if num_cases > 1 else ""
    return " on " + ", ".join(name_of(case.job, headings) for case in won)


def _gain(names: Sequence[str], won: Sequence[Case]) -> str:
    """From where to where the speed-ups of a sole winner are; that several are not told apart."""
    if len(names) > 1:
        return " (no significant difference)"
    baseline, best = won[0].baseline, [row for case in won for row in case.rows if row.best]
    gains = [row.standing.speedup.mean for row in best if row.standing.speedup]
    if not gains or all(row.contender.strategy == baseline for row in best):
        return ""
    least, most = (f"{value:.2f}x" for value in (min(gains), max(gains)))
    return f" ({least if least == most else f'{least} to {most}'} {baseline})"
