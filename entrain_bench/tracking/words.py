"""A sweep's answer in words: who is fastest where, by how much, and what failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from entrain_bench.tracking.sweep import Comparison, Point, describe_sweep, times_by_case

# Rows of the table that a description shows; the table of all is an artifact.
MAX_ROWS = 40
MAX_FAILURES = 5


def summary_markdown(name: str, points: Sequence[Point], comparison: Comparison) -> str:
    """The page of a sweep as Markdown: the answer first, then times of every case, then what has no result."""
    parts = [*_answer(comparison), f"**{name}**: {describe_sweep([point.record for point in points])}."]
    parts += [_table(points, comparison), *_failures(points)]
    return "\n\n".join(parts) + "\n"


def _answer(comparison: Comparison) -> list[str]:
    cases = len(comparison.best)
    sentences = []
    if comparison.wins:
        wins = [f"{variant} in {count}" for variant, count in comparison.wins]
        sentences.append(f"Fastest of {cases} case{'s' * (cases > 1)}: {', '.join(wins)}.")
    if comparison.baseline:
        others = {name: value for name, value in comparison.of_variants.items() if name != comparison.baseline}
        ranked = sorted(others.items(), key=lambda item: -item[1])
        listed = ", ".join(f"{name} {value:.2f}x" for name, value in ranked)
        sentences.append(f"Speed-up over {comparison.baseline}, geometric mean over cases and seeds: {listed}.")
    return [" ".join(sentences)] if sentences else []


def _table(points: Sequence[Point], comparison: Comparison) -> str:
    """Mean seconds an iteration by case and variant; bold is not significantly slower than the case's fastest."""
    cases = times_by_case(points)
    variants = list(dict.fromkeys(point.variant for point in points))
    lines = [["s/iteration", *variants], ["---", *["---:"] * len(variants)]]
    for case, times in [*cases.items()][:MAX_ROWS]:
        best = comparison.best.get(case, ())
        lines.append([case or "all", *(_cell(times.get(name, {}), name in best) for name in variants)])
    left = len(cases) - MAX_ROWS
    more = f"\n\n{left} more cases are in table.csv." if left > 0 else ""
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + more


def _cell(times: Mapping[int, float | None], is_best: bool) -> str:
    """A mean over seeds, and how many of them have a result where not all do."""
    known = [time for time in times.values() if time is not None]
    if not known:
        return "no result" if times else "-"
    text = f"{sum(known) / len(known):.3f}"
    text = f"**{text}**" if is_best else text
    return text if len(known) == len(times) else f"{text} ({len(known)} of {len(times)} seeds)"


def _failures(points: Sequence[Point]) -> list[str]:
    lost = [point for point in points if point.record.status != "ok"]
    lines = [f"- {point.name}: {point.record.status}: {point.record.reason}" for point in lost[:MAX_FAILURES]]
    if len(lost) > MAX_FAILURES:
        lines.append(f"- and {len(lost) - MAX_FAILURES} more")
    return ["Without result:\n\n" + "\n".join(lines)] if lines else []
