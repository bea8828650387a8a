"""Results of the check's sections, the files that keep them, and their report as one page of Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from entrain_bench.answers.text import markdown_table
from entrain_bench.lab.measuring import read_json

PASSED = "passed"
FAILED = "failed"
SKIPPED = "skipped"
# Columns for programs that read numbers.json.
HIDDEN = frozenset({"repetitions_s", "num_ranks", "seed", "chance", "sign_error"})
FORMATS = {"last_loss": ".6f", "largest_difference": ".1e", "error": "+.1%", "iteration_error": "+.1%", "MFU": ".1%"}
# Rows of a table: values by column.
type Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a section: verdict, one line, tables of rows, and output to show unmodified, by title."""

    verdict: str
    result: str
    tables: Mapping[str, Rows] = field(default_factory=dict)
    text: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SectionResult:
    """A section that came to an end, on the devices and with the options of ``identity``."""

    name: str
    identity: str
    finding: Finding
    seconds: float


def read_result(path: Path) -> SectionResult | None:
    """Return the result that a file holds, or None if there is none, or half of one."""
    try:
        values = read_json(path)
        return SectionResult(**values | {"finding": Finding(**values["finding"])})
    except (KeyError, TypeError):
        return None


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the check: the question that it answers, what looks (at a ``Check``), how its tables are to be read."""

    question: str
    run: Callable[[Any], Finding]
    note: str = ""


def page(title: str, command: str, results: Sequence[SectionResult], sections: Mapping[str, Section]) -> str:
    """Return the report: a title, what made it, and results in order; sections without one are listed as not run."""
    parts = [f"# {title}\n"]
    rows = [
        [r.name, sections[r.name].question, r.finding.verdict, r.finding.result, f"{r.seconds:.0f}"] for r in results
    ]
    done = {result.name for result in results}
    rows += [[name, each.question, "not run", "", ""] for name, each in sections.items() if name not in done]
    parts.append(markdown_table(["section", "question", "verdict", "result", "seconds"], rows, right=["seconds"]))
    parts.append(f"Made by `{command}`. All numbers: `numbers.json`; output of every process: `*.log`, `runs/`.")
    for result in results:
        finding = result.finding
        parts += [f"\n## {result.name}: {finding.verdict}\n", finding.result]
        if note := sections[result.name].note:
            parts.append(f"\n{note}")
        for heading, table in finding.tables.items():
            if table:
                parts += [f"\n**{heading}**\n" if heading else "", _table(table)]
        parts += [f"\n`{heading}`\n\n```\n{text}\n```" for heading, text in finding.text.items() if text]
    return "\n".join(parts) + "\n"


def _table(rows: Rows) -> str:
    def cell(column: str, value: Any) -> str:
        if value is None:
            return ""
        return f"{value:{FORMATS.get(column, '.4g')}}" if isinstance(value, float) else str(value)

    columns = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in HIDDEN]
    numbers = [name for name in columns if any(isinstance(row.get(name), float | int) for row in rows)]
    return markdown_table(columns, [[cell(name, row.get(name)) for name in columns] for row in rows], right=numbers)
