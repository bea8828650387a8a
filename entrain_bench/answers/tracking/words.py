"""A sweep as Markdown for MLflow: the answer, times of every case, what failed, samples, commands."""

from __future__ import annotations

from collections.abc import Sequence

from entrain_bench.answers.answer import Answer
from entrain_bench.answers.case import StrategyResult
from entrain_bench.answers.commands import commands_of
from entrain_bench.answers.documents.markdown import markdown_table
from entrain_bench.answers.notices import run_notices, sample_notices
from entrain_bench.answers.sentences import problems, sentences
from entrain_bench.answers.text import NOTHING, count, seconds
from entrain_bench.answers.tracking.sweep import describe_sweep

# Rows of the table that a description shows; the table of all is an artifact.
MAX_ROWS = 40
MAX_LINES = 5


def summary_markdown(name: str, answer: Answer, results_dir: str) -> str:
    """The page of a sweep as Markdown."""
    records, headings = answer.records, answer.varying or ["strategy"]
    parts = [" ".join(sentences(answer)), f"**{name}**: {describe_sweep(records)}.", _table(answer)]
    parts += _listed("Without result", [*problems(answer.results, headings)], MAX_LINES)
    parts += [*_listed("Samples", sample_notices(records)), *_listed("Remarks", run_notices(records))]
    parts += _listed("Run again", [f"`{line}`" for line in commands_of(records, results_dir)], MAX_LINES)
    return "\n\n".join(filter(None, parts)) + "\n"


def _table(answer: Answer) -> str:
    """Mean seconds an iteration by case and variant; bold is the fastest and what is as good."""
    heading = ["s/iteration", *answer.variants]
    left = len(answer.cases) - MAX_ROWS
    more = f"\n{count(left, 'more case')} in table.csv." if left > 0 else ""
    rows = []
    for case in answer.cases[:MAX_ROWS]:
        cells = {answer.variant(result.group): _cell(result) for result in case.results}
        rows.append([answer.case_name(case) or "all", *(cells.get(name, NOTHING) for name in answer.variants)])
    return markdown_table(heading, rows, heading[1:]) + more


def _cell(result: StrategyResult) -> str:
    """A mean over seeds, and how many of them have a result where not all do."""
    time, num_runs = result.standing.time, len(result.standing.times)
    if not time:
        return "no result"
    text = f"**{seconds(time.mean)}**" if result.best else seconds(time.mean)
    return text if time.num_values == num_runs else f"{text} ({time.num_values} of {num_runs} seeds)"


def _listed(title: str, lines: Sequence[str], most: int | None = None) -> list[str]:
    left = len(lines) - (most or len(lines))
    shown = [*lines[:most], *([f"and {left} more"] if left > 0 else [])]
    return [f"{title}:\n\n" + "\n".join(f"- {line}" for line in shown)] if lines else []
