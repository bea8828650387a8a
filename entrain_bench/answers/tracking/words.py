"""A sweep in words, for MLflow: its name, what it is made of, the answer, what failed, commands."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

from entrain_bench.answers.answer import Answer
from entrain_bench.answers.cases import StrategyResult
from entrain_bench.answers.commands import commands_of
from entrain_bench.answers.sentences import problems, run_notices, sample_notices, sentences
from entrain_bench.answers.text import NOTHING, count, listing, markdown_table, seconds
from entrain_bench.records.records import LABELS, Record

# Overrides that say nothing about what is swept.
ASIDE = ("results_dir=", "mlflow", "retry=", "hydra")
# MLflow takes 500 characters; the page is readable with fewer.
MAX_NAME = 160


def sweep_name(overrides: Sequence[str]) -> str:
    """Return the name of a sweep: its figure, or its overrides, or ``defaults`` without any."""
    texts = [text for text in overrides if not text.lstrip("+").startswith(ASIDE)]
    name = texts[0].removeprefix("figure=") if len(texts) == 1 else " ".join(texts)
    return shortened(name) or "defaults"


def shortened(name: str) -> str:
    """A name that is not too long for a page or a file, and is another one for another name."""
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}... {digest}"


def describe_sweep(records: Sequence[Record]) -> str:
    """Return one sentence on the runs of a sweep."""
    parts = []
    for name in LABELS:
        values = list(dict.fromkeys(str(record.labels[name]) for record in records))
        plural = {"strategy": "strategies", "harness": "harnesses"}.get(name, f"{name}s")
        one = len(values) == 1
        parts.append(f"{name} {values[0]}" if one else f"{len(values)} {plural} ({listing(values, 'and')})")
    states = Counter(record.status for record in records)
    return f"{', '.join(parts)}: " + ", ".join(f"{count(n, 'run')} {status}" for status, n in sorted(states.items()))


# Rows of the table that the summary shows, and a description; the table of all is an artifact.
MAX_ROWS = 40
MAX_SHOWN = 8
MAX_LINES = 5
# Letters of the sentences above a description's table, the first of which is always there.
MAX_LETTERS = 160


def description(answer: Answer) -> str:
    """Return the Markdown that MLflow shows above a sweep's runs: the answer, its table, further sentences, notices."""
    first, *others = [*sentences(answer)] or [""]
    while others and len(first) + len(others[0]) < MAX_LETTERS:
        first = f"{first} {others.pop(0)}"
    parts = [first, _table(answer, MAX_SHOWN), " ".join(others), *_noticed(answer.records)]
    return "\n\n".join(filter(None, parts)) + "\n"


def summary_markdown(name: str, answer: Answer, results_dir: str) -> str:
    """The page of a sweep as Markdown."""
    records = answer.records
    headings = answer.varying or ["strategy"]
    parts = [" ".join(sentences(answer)), f"**{name}**: {describe_sweep(records)}.", _table(answer)]
    parts += _listed("Without result", [*problems(answer.results, headings)], MAX_LINES)
    parts += _noticed(records)
    parts += _listed("Run again", [f"`{line}`" for line in commands_of(records, results_dir)], MAX_LINES)
    return "\n\n".join(filter(None, parts)) + "\n"


def _table(answer: Answer, most: int = MAX_ROWS) -> str:
    """Mean seconds an iteration by case and variant; bold is the fastest and what is as good."""
    heading = ["s/iteration", *answer.variants]
    left = len(answer.cases) - most
    more = f"\n{count(left, 'more case')} in table.csv." if left > 0 else ""
    rows = []
    for case in answer.cases[:most]:
        cells = {answer.variant(result.group): _cell(result) for result in case.results}
        rows.append([answer.case_name(case) or "all", *(cells.get(name, NOTHING) for name in answer.variants)])
    return markdown_table(heading, rows, heading[1:]) + more


def _noticed(records: Sequence[Record]) -> list[str]:
    return [*_listed("Samples", sample_notices(records)), *_listed("Remarks", run_notices(records))]


def _cell(result: StrategyResult) -> str:
    """A mean over seeds, and how many of them have a result where not all do."""
    time = result.standing.time
    num_runs = len(result.standing.times)
    if not time:
        return "no result"
    text = f"**{seconds(time.mean)}**" if result.best else seconds(time.mean)
    return text if time.num_values == num_runs else f"{text} ({time.num_values} of {num_runs} seeds)"


def _listed(title: str, lines: Sequence[str], most: int | None = None) -> list[str]:
    left = len(lines) - (most or len(lines))
    shown = [*lines[:most], *([f"and {left} more"] if left > 0 else [])]
    return [f"{title}:\n\n" + "\n".join(f"- {line}" for line in shown)] if lines else []
