"""Output of a command: one line per run, then a table and the fastest strategies."""

import math
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from entrain_bench.answers.answer import Answer
from entrain_bench.answers.cases import NAMES, Case, StrategyResult, name_of
from entrain_bench.answers.comparison import TIME
from entrain_bench.answers.sentences import host_notices, notices, problems, sentences
from entrain_bench.answers.text import NOTHING, decimals, seconds, speedup, spell_seeds, wrap
from entrain_bench.records.records import Record
from entrain_bench.records.tables import GAP

# Wide enough for the table when the output is not a terminal.
PLAIN_WIDTH = 140
SPACE = "  "
# Metric, scale and format of each column, the most telling first: those that the width has no room for are left out.
# All of them compare strategies of any layouts; others are shown if asked for (``columns``).
METRICS = {
    "MFU %": ("mfu", 100.0, ".1f"),
    "gap %": (GAP, 100.0, ".1f"),
    "peak GiB": ("peak_memory_bytes", 1 / 2**30, ".1f"),
    "samples/s": ("samples_per_s", 1.0, ".1f"),
}
SPEEDUP = "speedup"
# Columns that are never left out.
ALWAYS = ("s/iter", "runs", SPEEDUP)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table: its heading, one text a row, and whether these are words, which are flush left."""

    heading: str
    cells: Sequence[str]
    has_words: bool = False

    @property
    def width(self) -> int:
        """Places on the screen that its widest text takes."""
        return max(map(cell_len, (self.heading, *self.cells)))


def make_console() -> Console:
    """Standard output; wide enough for tables if it is no terminal and ``COLUMNS`` does not state its width."""
    console = Console()
    is_stated = console.is_terminal or os.environ.get("COLUMNS", "").isdigit()
    return console if is_stated else Console(width=PLAIN_WIDTH)


def print_texts(headings: Sequence[str], rows: Sequence[Sequence[str]], title: str = "", left: int = 1) -> None:
    """Print a table whose first ``left`` columns are flush left; only the widest one with words wraps, so no name."""
    console = make_console()
    columns = [
        Column(heading, cells, has_words=any(" " in cell for cell in cells))
        for heading, *cells in zip(headings, *rows, strict=True)
    ]
    widest = max(columns, key=lambda column: column.has_words * column.width)
    room = console.width - sum(column.width + len(SPACE) for column in columns if column is not widest)
    texts = [wrap(cell, room).splitlines() or [""] for cell in widest.cells]
    gaps = [[""] * (len(text) - 1) for text in texts]
    for place, column in enumerate(columns):
        cells = texts if column is widest else [[cell, *gap] for cell, gap in zip(column.cells, gaps, strict=True)]
        columns[place] = replace(column, cells=[*chain.from_iterable(cells)])
    if title:
        console.print(Text(title, style="bold"))
    for line in table_lines(columns, left):
        console.print(Text(line), soft_wrap=True)


def print_words(text: str) -> None:
    """Print a text in lines of whole words."""
    console = make_console()
    for line in wrapped(text, console.width):
        console.print(line, soft_wrap=True)


def describe_cell(place: str, record: Record) -> str:
    """Return one line on a cell that was run."""
    name = name_of(record.labels, [one for one in NAMES if one != "harness"])
    outcome = (
        f"{record.metrics[TIME]:.3f} s/iteration" if record.status == "ok" else f"{record.status}: {record.reason}"
    )
    return f"{place} {name} seed {record.labels['seed']}: {outcome}"


def print_table(records: Sequence[Record], lost: Sequence[str] = (), asked: Sequence[str] = ()) -> None:
    """Print the ``summary`` of some runs to standard output."""
    console = make_console()
    for line in summary(records, console.width, lost, asked):
        console.print(line, soft_wrap=True)


def summary(
    records: Sequence[Record], width: int, lost: Sequence[str] = (), asked: Sequence[str] = ()
) -> Iterator[Text]:
    """Return lines on runs: their common values, a table, runs without a result, the answer, and notices on samples.

    ``lost`` are planned runs that left no record, ``asked`` further metrics. No label is ever cut: if the labels alone
    take more than the width, so does the table.
    """
    answer = Answer.of(records, lost)
    said = [line for sentence in sentences(answer) for line in wrapped(sentence, width)]
    if not answer.results:
        yield from said
        return
    yield from overview(answer, width, asked)
    words = [*map(Text, problems(answer)), *said]
    words += [line for notice in (*notices(records), *host_notices(records)) for line in wrapped(notice, width)]
    yield from [Text(), *words] if words else []


def overview(answer: Answer, width: int, asked: Sequence[str] = ()) -> Iterator[Text]:
    """Return lines on runs: their common labels, and their table."""
    rows = answer.results
    labels = answer.headings
    shared = [f"{name} {text}" for name, text in rows[0].labels.items() if name not in labels]
    yield from wrapped(", ".join([*shared, spell_seeds([seed for row in rows for seed in row.runs])]), width)
    if any(row.standing.time for row in rows):
        named = [Column(label, [row.labels[label] for row in rows]) for label in labels]
        values = value_columns(rows, answer.baseline, asked)
        columns = fitting([*named, *values], width, [*labels, *ALWAYS, *asked])
        yield from wrapped(_legend([column.heading for column in columns], answer.baseline), width)
        yield from _table(answer.cases, columns, len(labels))


def _table(cases: Sequence[Case], columns: Sequence[Column], num_labels: int) -> Iterator[Text]:
    heading, rule, *lines = table_lines(columns, num_labels)
    yield from map(Text, (heading, rule))
    texts = iter(lines)
    apart = any(len(case.results) > 1 for case in cases)
    for place, case in enumerate(cases):
        if apart and place:
            yield Text()
        for row in case.results:
            yield Text(next(texts), style="bold" if row.best else "")


def table_lines(columns: Sequence[Column], num_labels: int = 0) -> list[str]:
    """Columns as lines: headings, a rule, and one a row; the first ``num_labels`` columns are flush left."""
    lines = [
        SPACE.join(
            text + " " * (column.width - cell_len(text))
            if place < num_labels or column.has_words
            else text.rjust(column.width)
            for place, (column, text) in enumerate(zip(columns, texts, strict=True))
        ).rstrip()
        for texts in zip(*((column.heading, *column.cells) for column in columns), strict=True)
    ]
    return [lines[0], "\N{BOX DRAWINGS LIGHT HORIZONTAL}" * max(map(cell_len, lines)), *lines[1:]]


def fitting(columns: Sequence[Column], width: int, kept: Collection[str]) -> list[Column]:
    """Return the columns that fit, in their order: those ``kept`` by their heading, then as many others."""
    taken = [column for column in columns if column.heading in kept]
    room = width - sum(column.width + len(SPACE) for column in taken) + len(SPACE)
    for column in [one for one in columns if one not in taken]:
        room -= column.width + len(SPACE)
        if room < 0:
            break
        taken.append(column)
    return [column for column in columns if column in taken]


def value_columns(rows: Sequence[StrategyResult], baseline: str, asked: Sequence[str] = ()) -> list[Column]:
    """Every column that says something, in the order of the table; ``asked`` are further metrics."""
    means = [row.standing.time for row in rows]
    digits = decimals([time.mean for time in means if time])
    # Without a time, the status of the first run.
    states = [row.runs[min(row.runs)].status for row in rows]
    texts = [seconds(time.mean, digits) if time else state for time, state in zip(means, states, strict=True)]
    # The baseline's speedup over itself says nothing.
    speedups = [NOTHING if row.strategy == baseline else speedup(row.standing.speedup) for row in rows]
    columns = [
        Column("s/iter", texts),
        Column("±", [seconds(time.margin if time and time.num_values > 1 else None, digits) for time in means]),
        Column("runs", _counts(rows)),
        Column(SPEEDUP, speedups),
        *(Column(name, [_mean(row, *metric) for row in rows]) for name, metric in METRICS.items()),
        *(Column(name, [_mean(row, name) for row in rows]) for name in asked),
    ]
    return [column for column in columns if {*column.cells} != {NOTHING}]


def _legend(headings: Sequence[str], baseline: str) -> str:
    meanings = {
        "±": "±: half of the 95% CI over seeds",
        SPEEDUP: f"{SPEEDUP}: over {baseline}, seed by seed (95% CI)",
        "gap %": "gap: above the lower bound of the cluster",
    }
    return "; ".join(text for heading, text in meanings.items() if heading in headings)


def _counts(rows: Sequence[StrategyResult]) -> list[str]:
    counts = [(row.standing.num_ok, len(row.standing.times)) for row in rows]
    if len({*counts}) == 1 and counts[0][0] == counts[0][1]:
        return [NOTHING] * len(rows)
    return [f"{done}" if done == total else f"{done}/{total}" for done, total in counts]


def _mean(row: StrategyResult, metric: str, scale: float = 1.0, form: str = ".4g") -> str:
    values = [*row.values(metric).values()]
    return format(scale * math.fsum(values) / len(values), form) if values else NOTHING


def wrapped(text: str, width: int) -> list[Text]:
    """Text in lines of whole words."""
    return [Text(line) for line in wrap(text, width).splitlines()]
