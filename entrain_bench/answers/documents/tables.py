"""Measured tables of ``experiments/table``, their Markdown, and how pages of ``docs`` take them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import product
from string import Formatter
from typing import Any

import pandas as pd

from entrain_bench.answers.documents.definition import check_keys, flat, overrides, read_definitions, words
from entrain_bench.answers.statistics import mean_interval
from entrain_bench.answers.tables import run_actions, run_table, without_result
from entrain_bench.answers.text import markdown_table
from entrain_bench.base.errors import require, unknown_choice
from entrain_bench.base.files import write_atomically
from entrain_bench.config.tree import config_tree
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import Results
from entrain_bench.run.study import Output, Study, SweepOverrides

# Folder of the tables in results.
TABLES = "tables"
# A table's place on a page; within a line, the place of a number or a sentence.
PLACE = re.compile(r"(<!-- table: (\S+) -->)(.*?)(<!-- end -->)", re.DOTALL)
# From the pages of most tables to the top of the repository.
WAY_UP = "../../"
# Column of the key that numbers are spread over, and the usual key.
OVER = "over"
SEED = "seed"
# Defaults of keys that a table may leave out.
USUAL = {
    "corner": "workload",
    "columns": {"": []},
    "over": SEED,
    "show": "{iteration_time_s:.3f} ± {iteration_time_s.margin:.3f}",
}
# In the text of a layout: a module's layers, too long for a cell, and the name of a module that recomputes.
LAYERS = r" layers [\d/]+"
RECOMPUTING = r"(\S+) tp[^;]* recompute"
GIB = "peak_memory_gib"
# Number of a replica's microbatches, and samples of an average microbatch.
MICROBATCHES = "num_microbatches"
SAMPLES = "samples_per_microbatch"
# Texts: degrees of every module; modules whose activations are recomputed.
DEGREES = "degrees"
RECOMPUTED = "recomputed"


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, median and ends of a number over runs or replicas; its format is that of the mean.

    The margin is half of the mean's 95% CI; NaN for a single value.
    """

    mean: float = 0.0
    median: float = 0.0
    least: float = 0.0
    most: float = 0.0
    margin: float = 0.0

    @property
    def range(self) -> float:
        """How much greater the greatest is than the least, relative to the least."""
        return self.most / self.least - 1.0 if self.least else 0.0

    def __format__(self, spec: str) -> str:
        return format(self.mean, spec)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of measured numbers.

    Attributes:
        corner: heading of the first column.
        show: content of each column, by a further heading; texts with numbers in braces, as ``str.format`` takes them.
        over: key whose values a cell's numbers are spread over, each value with its mean over the seeds; ``seed``: the
            runs themselves.
        file: name of the YAML, without its suffix.
    """

    name: str
    title: str
    common: SweepOverrides
    corner: str
    rows: Mapping[str, SweepOverrides]
    columns: Mapping[str, SweepOverrides]
    show: Mapping[str, str]
    over: str = SEED
    file: str

    def sweep(self, row: str, column: str) -> SweepOverrides:
        """The overrides of the runs behind a cell."""
        return (*self.common, *self.rows[row], *self.columns[column])

    @property
    def sweeps(self) -> list[SweepOverrides]:
        """The overrides of the runs behind each cell."""
        return [self.sweep(row, column) for row, column in product(self.rows, self.columns)]

    @property
    def fields(self) -> set[str]:
        """Everything that its cells show."""
        return {name for text in self.show.values() for name in _fields(text)}


def _fields(text: str) -> set[str]:
    """Names in the braces of a text, without the part after a dot."""
    return {name.partition(".")[0] for _, name, _, _ in Formatter().parse(text) if name is not None}


def parse_table(name: str, values: Mapping[str, Any], file: str) -> Table:
    """A table from plain values.

    Values in ``USUAL`` may be left out, and ``show`` may be one text. Raises ``UserError`` for an unknown or missing
    key.
    """
    names = [field.name for field in fields(Table) if field.name not in ("name", "file")]
    stated = {**USUAL, **values}
    check_keys(stated, names, names)
    rows, columns = _labelled(stated["rows"]), _labelled(stated["columns"])
    common = tuple(overrides(stated["common"]).values())
    show = stated["show"] if isinstance(stated["show"], Mapping) else {"": stated["show"]}
    read = {"title": words(stated["title"]), "common": common, "rows": rows, "columns": columns, "show": show}
    return Table(**stated | read, name=name, file=file)


def _labelled(values: Any) -> dict[str, SweepOverrides]:
    """Overrides by label: a mapping, or ``key=a,b``, whose values are the labels; of a list every combination."""
    axes = []
    for axis in flat(values):
        if isinstance(axis, str):
            key, _, choices = axis.partition("=")
            axis = {choice: [f"{key}={choice}"] for choice in choices.split(",")}
        axes.append([(str(label), tuple(overrides(texts).values())) for label, texts in axis.items()])
    return {
        " ".join(label for label, _ in combination): tuple(text for _, texts in combination for text in texts)
        for combination in product(*axes)
    }


def load_tables() -> list[Table]:
    """Every table, file by file; ``UserError`` naming a file and a table that is malformed."""

    def parse(file: str, name: str, values: Mapping[str, Any]) -> list[Table]:
        return [parse_table(name, values, file)]

    return [
        table
        for path in sorted((config_tree() / "table").glob("*.yaml"))
        for table in read_definitions(path, "tables", partial(parse, path.stem))
    ]


def tables_output() -> Output:
    """All tables."""
    tables = load_tables()
    # Tables with columns that only timelines tell.
    counting = [one for one in tables if one.fields & {MICROBATCHES, SAMPLES}]
    return Output(
        "tables",
        [sweep for table in tables for sweep in table.sweeps],
        lambda study: write_tables(tables, study),
        timelines=lambda study: [[cell] for table in counting for cell in study.cells_by_key(table.sweeps).values()],
    )


def write_tables(tables: Sequence[Table], study: Study) -> str:
    """Write ``tables/<name>.md``; returns missing runs, if any."""
    problems = []
    for table in tables:
        text = table_markdown(table, study)
        write_atomically(study.results.root / TABLES / f"{table.name}.md", text.encode())
        problems += [f"{table.name}: {problem}" for sweep in table.sweeps if (problem := study.problem(*sweep))]
    return "; ".join(problems)


def table_markdown(table: Table, study: Study) -> str:
    """Title, common overrides and the table; runs without result are counted where they are, and named below."""
    shows = {
        " ".join(filter(None, (column, shown))): text for column in table.columns for shown, text in table.show.items()
    }
    right = [heading for heading, text in shows.items() if DEGREES not in _fields(text)]
    rows = [
        [row, *(text for column in table.columns for text in _texts(table, row, column, study))] for row in table.rows
    ]
    notes = [
        f"{', '.join(filter(None, (row, column)))}: {sentence}"
        for row, column in product(table.rows, table.columns)
        for sentence in without_result(run_table(study.cells(*table.sweep(row, column)), study.results))
    ]
    source = f"[{table.name}]({WAY_UP}experiments/table/{table.file}.yaml)"
    # Sentences of their own: the check of words reads titles alone.
    caption = f"{table.title}. Runs of {source}: `{' '.join(table.common)}`.\n\n"
    listed = "".join(f"\n- {note}" for note in notes)
    return caption + markdown_table([table.corner, *shows], rows, right) + (f"{listed}\n" if listed else "")


def _texts(table: Table, row: str, column: str, study: Study) -> list[str]:
    cells = study.cells(*table.sweep(row, column))
    runs = run_table(cells, study.results, {} if table.over == SEED else {OVER: table.over})
    done = runs[runs["status"] == "ok"]
    without = runs[runs["status"] != "ok"]
    if done.empty:
        return [str(without["status"].iloc[0])] * len(table.show)
    cells = [cell for cell in cells if cell.key in {*done["key"]}]
    values = {name: _value(name, done, cells, study.results) for name in table.fields}
    lacking = f", {len(without)} of {len(runs)} {without['status'].iloc[0]}" if len(without) else ""
    return [text.format(**values) + lacking for text in table.show.values()]


def _value(name: str, runs: pd.DataFrame, cells: Sequence[Cell], results: Results) -> Spread | str:
    if name == DEGREES:
        # The layout that most seeds have, how many, and how many others there are.
        layouts = Counter(runs["layout"].str.replace(LAYERS, "", regex=True))
        ((layout, count),) = layouts.most_common(1)
        others = len(layouts) - 1
        more = f"; {others} other{'s' if others > 1 else ''}" if others else ""
        return _at_seeds(layout, count, len(runs)) + more
    if name == RECOMPUTED:
        modules = Counter(runs["layout"].str.findall(RECOMPUTING).explode().dropna())
        return ", ".join(_at_seeds(name, modules[name], len(runs)) for name in sorted(modules)) or "none"
    if name in (MICROBATCHES, SAMPLES):
        counts = [microbatches(run_actions([cell], results)) for cell in cells]
        sizes = [cell.config.global_batch / count.sum() for cell, count in zip(cells, counts, strict=True)]
        return spread(pd.concat(counts) if name == MICROBATCHES else pd.Series(sizes))
    numbers = runs["peak_memory_bytes"] / 2**30 if name == GIB else runs[name]
    return spread(numbers.groupby(runs[OVER]).mean() if OVER in runs else numbers)


def _at_seeds(text: str, count: int, num_seeds: int) -> str:
    return text if count == num_seeds else f"{text} at {count} of {num_seeds} seeds"


def spread(values: pd.Series[float]) -> Spread:
    """Mean, median, least, greatest and the mean's margin of some numbers."""
    mean, median, least, most = (float(values.agg(statistic)) for statistic in ("mean", "median", "min", "max"))
    return Spread(mean, median, least, most, mean_interval(values.tolist()).margin)


def microbatches(actions: pd.DataFrame) -> pd.Series[float]:
    """LLM microbatches of every replica of every seed ``[seeds x replicas]``, of ``run_actions``.

    Raises ``UserError`` if there are none, for the timelines of large programs are not kept.
    """
    require(not actions.empty, "show", MICROBATCHES, "left out where no timeline was kept")
    forwards = actions[(actions["side"] == "llm") & actions["pass"].eq("forward")]
    return forwards.groupby(["seed", "replica"])["microbatch"].nunique().astype(float)


def splice(page_text: str, tables: Mapping[str, str], way_up: str = WAY_UP) -> str:
    """A page with each table put between its ``<!-- table: NAME -->`` and ``<!-- end -->``.

    ``way_up`` leads from the page's folder to the top of the repository. Raises ``UserError`` for an unknown table.
    """

    def put(match: re.Match[str]) -> str:
        begin, name, before, end = match.groups()
        if name not in tables:
            raise unknown_choice("table", name, tables)
        text = tables[name].strip("\n").replace(f"]({WAY_UP}", f"]({way_up}")
        gap = "\n\n" if "\n" in before + text else ""
        return f"{begin}{gap}{text}{gap}{end}"

    return PLACE.sub(put, page_text)
