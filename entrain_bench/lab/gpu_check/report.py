"""The report as one page of Markdown: first who passed, then what was found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from entrain_bench.answers.documents.markdown import markdown_table
from entrain_bench.lab.gpu_check.result import Rows, StepResult

# What each step asks.
QUESTIONS = {
    "environment": "What is there?",
    "tests": "Do the tests that need a GPU pass?",
    "correctness": "Does every strategy compute the losses of one device?",
    "profile": "How fast are layers, optimizer and communication?",
    "fidelity": "How near are predictions with that profile?",
    "throughput": "How fast does the 1B model train?",
}
NOTES = {
    "correctness": "The tiny model, three optimizer steps; the largest relative difference of a loss from that of one "
    "device. A strategy that finds no layout for so many devices is skipped.",
    "fidelity": "Seconds an iteration, mean over all but the first, which warms up; predictions by the simulator with "
    "the profile of this report, links included. Speed-ups: of `fast` over `slow`, with the 95% interval over "
    "iterations. Packs larger than those profiled go on with the last slope.",
    "throughput": "Means over all but the first iteration; predictions as above. MFU is a share of the fastest product "
    "that was measured (step profile), not of a datasheet's peak.",
}
# Columns that are for other programs.
HIDDEN = frozenset({"repetitions_s"})
FORMATS = {"last_loss": ".6f", "largest_difference": ".1e", "error": "+.1%", "MFU": ".1%"}


def page(title: str, command: str, results: Sequence[StepResult], missing: Sequence[str]) -> str:
    """The report.

    Args:
        title: its heading.
        command: what made it.
        results: of steps, in their order.
        missing: steps that have not come to an end.
    """
    return "\n".join(_lines(title, command, results, missing)) + "\n"


def _lines(title: str, command: str, results: Sequence[StepResult], missing: Sequence[str]) -> Iterator[str]:
    yield f"# {title}\n"
    rows = [[r.name, QUESTIONS[r.name], r.finding.verdict, r.finding.result, f"{r.seconds:.0f}"] for r in results]
    rows += [[name, QUESTIONS[name], "not run", "", ""] for name in missing]
    yield markdown_table(["step", "question", "verdict", "result", "seconds"], rows, right=["seconds"])
    yield f"Made by `{command}`. All numbers: `numbers.json`; output of every process: `*.log`, `runs/`."
    for result in results:
        yield from _section(result)


def _section(result: StepResult) -> Iterator[str]:
    finding = result.finding
    yield f"\n## {result.name}: {finding.verdict}\n"
    yield finding.result
    if note := NOTES.get(result.name):
        yield f"\n{note}"
    for title, rows in finding.tables.items():
        if rows:
            yield f"\n**{title}**\n" if title else ""
            yield _table(rows)
    for title, text in finding.text.items():
        if text:
            yield f"\n`{title}`\n\n```\n{text}\n```"


def _table(rows: Rows) -> str:
    columns = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in HIDDEN]
    numbers = [name for name in columns if any(isinstance(row.get(name), float | int) for row in rows)]
    return markdown_table(columns, [[_cell(name, row.get(name)) for name in columns] for row in rows], right=numbers)


def _cell(column: str, value: Any) -> str:
    if value is None:
        return ""
    return f"{value:{FORMATS.get(column, '.4g')}}" if isinstance(value, float) else str(value)
