"""Measured tables: ``experiments/table`` as Markdown, and how pages of ``docs`` take them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from entrain_bench.answers.documents.definition import load_definitions
from entrain_bench.answers.documents.table import (
    DEGREES,
    GIB,
    KEYS,
    LEAD_KEYS,
    MICROBATCHES,
    RECOMPUTED,
    SAMPLES,
    SEED,
    WAY_UP,
    Lead,
    Spread,
    Table,
    fields_of,
    lead_markdown,
    parse_lead,
    parse_table,
)
from entrain_bench.answers.statistics import mean_interval
from entrain_bench.answers.tables import run_actions, run_table, without_result
from entrain_bench.base.errors import UserError, require, unknown_choice
from entrain_bench.base.files import write_atomically
from entrain_bench.config.compose import IN_FIGURES
from entrain_bench.config.tree import config_tree
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import Results
from entrain_bench.run.study import Output, Study

# Where the tables are in a folder of results.
TABLES = "tables"
# Behind a lead's name: the file with its sentences alone, for pages that show no table.
SENTENCES = "_sentences"
# A table's place on a page, up to its end or what comes instead of it.
PLACE = re.compile(r"<!-- table: (\S+) -->.*?(<!-- end -->|(?=<!-- table: )|\Z)", re.DOTALL)

# Column of the key that numbers are spread over.
OVER = "over"
# In the text of a layout: a module's layers, too long for a cell, and the name of a module that recomputes.
LAYERS = r" layers [\d/]+"
RECOMPUTING = r"(\S+) tp[^;]* recompute"


def load_tables() -> list[Table | Lead]:
    """Every table of ours, file by file."""
    return _tables_in(config_tree(), strategies_by_family())


def tables_of(config_dir: str | None) -> list[Table | Lead]:
    """The tables of a folder of the user's; their leads know the families of its strategies, too.

    Raises:
        UserError: for one that is called as one of ours.
    """
    if config_dir is None:
        return []
    theirs = [replace(table, file="") for table in _tables_in(Path(config_dir), strategies_by_family(config_dir))]
    if taken := {table.name for table in load_tables()} & {table.name for table in theirs}:
        raise UserError(f"{config_dir}: there is a table {min(taken)}; must have another name")
    return theirs


def _tables_in(folder: Path, families: Mapping[str, Sequence[str]]) -> list[Table | Lead]:
    def parse(name: str, values: Mapping[str, Any]) -> Table | Lead:
        return parse_lead(name, values, families) if "leader" in values else parse_table(name, values)

    return [
        replace(table, file=path.stem)
        for path in sorted((folder / "table").glob("*.yaml"))
        for table in load_definitions(path, "tables", {*KEYS, *LEAD_KEYS}, parse, verbatim="show")
    ]


def strategies_by_family(config_dir: str | None = None) -> dict[str, list[str]]:
    """Names of the strategies of every family that a strategy's YAML states; without those that no figure shows."""
    found: dict[str, list[str]] = {}
    for folder in (config_tree(), *([Path(config_dir)] if config_dir else [])):
        for path in sorted((folder / "strategy").glob("*.yaml")):
            stated = yaml.safe_load(path.read_text())
            if (family := stated.get("family")) and stated.get("in_figures") != IN_FIGURES[-1]:
                found.setdefault(str(family), []).append(path.stem)
    return found


def tables_output(table: Table | Lead | None = None) -> Output:
    """A table, or all of ours; each is read once."""
    tables = [table] if table else load_tables()
    sweeps = [sweep for each in tables for sweep in each.sweeps]
    # What a table shows that only timelines tell.
    counting = [each for each in tables if isinstance(each, Table) and each.fields & {MICROBATCHES, SAMPLES}]
    counted = [sweep for each in counting for sweep in each.sweeps]

    return Output(
        table.name if table else "tables",
        sweeps,
        lambda study: write_tables(tables, study),
        timelines=lambda study: [[cell] for sweep in counted for cell in study.cells(*sweep)],
    )


def write_tables(tables: Sequence[Table | Lead], study: Study) -> str:
    """Write ``tables/<name>.md``, and of a lead its sentences; returns what is missing from them, if anything."""
    problems = []
    for table in tables:
        if isinstance(table, Table):
            text = table_markdown(table, study)
        else:
            text, told = lead_markdown(table, study)
            write_atomically(study.results.root / TABLES / f"{table.name}{SENTENCES}.md", told.encode())
        write_atomically(study.results.root / TABLES / f"{table.name}.md", text.encode())
        problems += [f"{table.name}: {problem}" for sweep in table.sweeps if (problem := study.problem(*sweep))]
    return "; ".join(problems)


def table_markdown(table: Table, study: Study) -> str:
    """Title, common overrides and the table; runs without result are counted where they are, and named below."""
    shows = {
        " ".join(filter(None, (column, shown))): text for column in table.columns for shown, text in table.show.items()
    }
    right = [heading for heading, text in shows.items() if DEGREES not in fields_of(text)]
    rows = [
        [row, *(text for column in table.columns for text in _texts(table, row, column, study))] for row in table.rows
    ]
    notes = [
        f"{', '.join(filter(None, (row, column)))}: {sentence}"
        for row, column in product(table.rows, table.columns)
        for sentence in without_result(run_table(study.cells(*table.sweep(row, column)), study.results))
    ]
    return table.captioned([*shows], rows, right, notes)


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
        return ", ".join(_at_seeds(each, modules[each], len(runs)) for each in sorted(modules)) or "none"
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
    """LLM microbatches of every replica of every seed ``[seeds x replicas]``.

    Args:
        actions: as ``run_actions`` returns them.

    Raises:
        UserError: if there are none, for the timelines of large programs are not kept.
    """
    require(not actions.empty, "show", MICROBATCHES, "left out where no timeline was kept")
    forwards = actions[(actions["side"] == "llm") & actions["pass"].eq("forward")]
    return forwards.groupby(["seed", "replica"])["microbatch"].nunique().astype(float)


def pages_with_tables(pages: Mapping[Path, str], root: Path) -> Iterator[tuple[Path, str]]:
    """The pages that have places for tables, and their text with the tables that are in a folder of results.

    Args:
        pages: the way from each page's folder to the top of the repository, for links.
        root: the folder of results.

    Raises:
        UserError: as ``splice`` does, naming the page.
    """
    tables = {path.stem: path.read_text() for path in (root / TABLES).glob("*.md")}
    for page, way_up in pages.items():
        text = page.read_text()
        if not PLACE.search(text):
            continue
        linked = {name: table.replace(f"]({WAY_UP}", f"]({way_up}") for name, table in tables.items()}
        try:
            yield page, splice(text, linked)
        except UserError as error:
            raise UserError(f"{page}: {error}") from error


def splice(page_text: str, tables: Mapping[str, str]) -> str:
    """A page with each table put between its ``<!-- table: NAME -->`` and ``<!-- end -->``.

    Raises:
        UserError: for a name that no table has, and a marker without its end.
    """

    def put(match: re.Match[str]) -> str:
        name = match[1]
        end = match[2]
        if name not in tables:
            raise unknown_choice("table", name, tables)
        if not end:
            raise UserError(f"table={name}: must be followed by <!-- end -->")
        return f"<!-- table: {name} -->\n\n{tables[name].strip('\n')}\n\n{end}"

    return PLACE.sub(put, page_text)
