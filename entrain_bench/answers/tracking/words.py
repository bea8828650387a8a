"""A sweep's answer in words: who is fastest where, by how much, and what failed."""

from __future__ import annotations

from collections.abc import Sequence

from entrain_bench.answers.cases import Case, Row
from entrain_bench.answers.notices import run_notices, sample_notices
from entrain_bench.answers.tracking.sweep import Sweep, describe_sweep

# Rows of the table that a description shows; the table of all is an artifact.
MAX_ROWS = 40
MAX_FAILURES = 5


def summary_markdown(name: str, sweep: Sweep) -> str:
    """The page of a sweep as Markdown: the answer, times of every case, runs without result, samples, remarks."""
    parts = [*_answer(sweep), f"**{name}**: {describe_sweep(sweep.records)}."]
    parts += [_table(sweep), *_failures(sweep)]
    parts += [*_listed("Samples", sample_notices(sweep.records)), *_listed("Remarks", run_notices(sweep.records))]
    return "\n\n".join(parts) + "\n"


def _answer(sweep: Sweep) -> list[str]:
    sentences = []
    if sweep.wins:
        count = sum(sweep.wins.values())
        wins = [f"{variant} in {won}" for variant, won in sweep.wins.items()]
        sentences.append(f"Fastest of {count} cases: {', '.join(wins)}." if count > 1 else f"Fastest: {sweep.fastest}.")
    if listed := ", ".join(_gain(sweep, variant) for variant in sweep.overall if variant != sweep.baseline):
        sentences.append(f"Speed-up over {sweep.baseline}, geometric mean over cases and seeds: {listed}.")
    if sweep.baseline and (without := _without_mean(sweep)):
        sentences.append(f"Without a mean, for lack of results: {', '.join(without)}.")
    return [" ".join(sentences)] if sentences else []


def _gain(sweep: Sweep, variant: str) -> str:
    """A speed-up and, of several seeds, its interval."""
    speedup = sweep.overall[variant].speedup
    ends = f" ({speedup.low:.2f} to {speedup.high:.2f})" if speedup.num_values > 1 else ""
    return f"{variant} {speedup.mean:.2f}x{ends}"


def _without_mean(sweep: Sweep) -> list[str]:
    return [variant for variant in sweep.variants if variant not in sweep.overall]


def _table(sweep: Sweep) -> str:
    """Mean seconds an iteration by case and variant; bold is not significantly slower than the case's fastest."""
    lines = [["s/iteration", *sweep.variants], ["---", *["---:"] * len(sweep.variants)]]
    lines += [_line(sweep, case) for case in sweep.cases[:MAX_ROWS]]
    left = len(sweep.cases) - MAX_ROWS
    more = f"\n\n{left} more cases are in table.csv." if left > 0 else ""
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + more


def _line(sweep: Sweep, case: Case) -> list[str]:
    rows = {sweep.variant(row.contender): row for row in case.rows}
    return [sweep.case_name(case) or "all", *(_cell(rows[name]) if name in rows else "-" for name in sweep.variants)]


def _cell(row: Row) -> str:
    """A mean over seeds, and how many of them have a result where not all do."""
    time, num_runs = row.standing.time, len(row.standing.times)
    if not time:
        return "no result"
    text = f"**{time.mean:.3f}**" if row.best else f"{time.mean:.3f}"
    return text if time.num_values == num_runs else f"{text} ({time.num_values} of {num_runs} seeds)"


def _failures(sweep: Sweep) -> list[str]:
    lost = [point for point in sweep.points() if point.record.status != "ok"]
    lines = [f"- {point.name}: {point.record.status}: {point.record.reason}" for point in lost[:MAX_FAILURES]]
    if len(lost) > MAX_FAILURES:
        lines.append(f"- and {len(lost) - MAX_FAILURES} more")
    return ["Without result:\n\n" + "\n".join(lines)] if lines else []


def _listed(title: str, lines: Sequence[str]) -> list[str]:
    return [f"{title}:\n\n" + "\n".join(f"- {line}" for line in lines)] if lines else []
