"""Measured tables of ``experiments/table``, their Markdown, and how pages of ``docs`` take them.

A table shows numbers of runs by row and column. A lead shows one strategy next to the fastest of its rivals.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from statistics import median
from string import Formatter
from typing import Any

import pandas as pd
import yaml

from entrain_bench.answers.comparison import TIME, Standing, compare, lead_of
from entrain_bench.answers.documents.definition import check_keys, flat, overrides, read_definitions, words
from entrain_bench.answers.labels import names
from entrain_bench.answers.sentences import lead_sentence, winners_sentence
from entrain_bench.answers.statistics import mean_interval
from entrain_bench.answers.tables import run_actions, run_table, times_by_seed, without_result
from entrain_bench.answers.text import markdown_table, seconds, speedup
from entrain_bench.base.errors import UserError, require, unknown_choice
from entrain_bench.base.files import write_atomically
from entrain_bench.config.compose import IN_FIGURES
from entrain_bench.config.tree import config_tree
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import MEASURED, METRICS, Results
from entrain_bench.run.study import Output, Study, SweepOverrides

# Folder of the tables in results, and end of the name of the file with a lead's sentences alone.
TABLES = "tables"
SENTENCES = "_sentences"
# A table's place on a page, up to its end or what comes instead of it.
PLACE = re.compile(r"<!-- table: (\S+) -->.*?(<!-- end -->|(?=<!-- table: )|\Z)", re.DOTALL)
# From the pages of most tables to the top of the repository.
WAY_UP = "../../"
# Column of the key that numbers are spread over, and the usual key.
OVER = "over"
SEED = "seed"
# Defaults of keys that a table may leave out.
USUAL = {
    "corner": "workload",
    "columns": {"": []},
    "rivals": {"": []},
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
# Name of the strategy that leads among the rivals, whose names are their strategies and labels.
LEADER = ""
# A page shows what is the same on all machines, so no wall times.
NUMBERS = (*(name for name in METRICS if name not in MEASURED), GIB, MICROBATCHES, SAMPLES)
FIELDS = (*NUMBERS, DEGREES, RECOMPUTED)


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, median and ends of a number over runs or replicas; its format is that of the mean.

    The margin is half of the mean's 95% interval; not a number if there is one value only.
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
class Definition:
    """The fields that all kinds of tables have.

    Attributes:
        common: overrides of all runs.
        corner: heading of the first column.
        rows: overrides of each row, by its label.
        file: name of the YAML, without its suffix; empty in a folder of the user's.
    """

    name: str
    title: str
    common: SweepOverrides
    corner: str
    rows: Mapping[str, SweepOverrides]
    file: str = ""

    def captioned(
        self, heading: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str], notes: Iterable[str]
    ) -> str:
        """Return a table below its title and the overrides that all runs share, and above its notes."""
        source = f"[{self.name}]({WAY_UP}experiments/table/{self.file}.yaml)" if self.file else self.name
        listed = "".join(f"\n- {note}" for note in notes)
        # Sentences of their own: the check of words reads titles alone.
        caption = f"{self.title}. Runs of {source}: `{' '.join(self.common)}`.\n\n"
        return caption + markdown_table([self.corner, *heading], rows, right) + (f"{listed}\n" if listed else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table(Definition):
    """A table of measured numbers.

    Attributes:
        columns: overrides of each column, by its heading.
        show: what each column shows, by a further heading; texts with numbers in braces, as ``str.format`` takes them.
        over: key whose values a cell's numbers are spread over, each value with its mean over the seeds; ``seed``: the
            runs themselves.
    """

    columns: Mapping[str, SweepOverrides]
    show: Mapping[str, str]
    over: str = SEED

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
        return {name for text in self.show.values() for name in fields_of(text)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lead(Definition):
    """A table of the speedups of one strategy over the fastest of others; its rows are jobs.

    Attributes:
        leader: overrides of that strategy.
        strategies: names of the strategies that it is compared with.
        rivals: overrides that each of them gets, by a label; several labels are rivals of their own. ``strategy=...``
            takes the place of the names.
    """

    leader: SweepOverrides
    strategies: Sequence[str]
    rivals: Mapping[str, SweepOverrides]

    def of_leader(self, row: str) -> SweepOverrides:
        """The overrides of the leader's runs in a job."""
        return (*self.common, *self.rows[row], *self.leader)

    def of_rival(self, row: str, label: str) -> SweepOverrides:
        """The overrides of the runs of all strategies in a job, with what a label stands for."""
        given = (*self.common, *self.rows[row], *self.rivals[label])
        named = any(text.startswith("strategy=") for text in given)
        return given if named else (f"strategy={','.join(self.strategies)}", *given)

    @property
    def sweeps(self) -> list[SweepOverrides]:
        """The overrides of all runs."""
        rivals = [self.of_rival(row, label) for row in self.rows for label in self.rivals]
        return [*map(self.of_leader, self.rows), *rivals]


def fields_of(text: str) -> set[str]:
    """Names in the braces of a text, without what follows a dot."""
    return {name.partition(".")[0] for _, name, _, _ in Formatter().parse(text) if name is not None}


def parse_table(name: str, values: Mapping[str, Any], families: Mapping[str, Sequence[str]]) -> Table | Lead:
    """A table from plain values; with ``leader`` it is a lead.

    What is in ``USUAL`` may be left out, ``show`` may be one text, and ``strategies`` is a list of names, one of the
    families, or ``all`` but the leader.

    Raises:
        UserError: for an unknown or missing key, an unknown family, and a text that cannot be shown.
    """
    is_lead = "leader" in values
    kind = Lead if is_lead else Table
    names = [field.name for field in fields(kind) if field.name not in ("name", "file")]
    stated = {**{key: value for key, value in USUAL.items() if key in names}, **values}
    check_keys(stated, names, names)
    for key in ("rows", "rivals" if is_lead else "columns"):
        stated[key] = _labelled(stated[key])
    for key in ("common", "leader") if is_lead else ("common",):
        stated[key] = tuple(overrides(stated[key]).values())
    stated |= {"name": name, "title": words(stated["title"])}
    if is_lead:
        return Lead(**stated | {"strategies": _strategies(stated, families)})
    show = stated["show"] if isinstance(stated["show"], Mapping) else {"": stated["show"]}
    for text in show.values():
        _check_shown(text)
    return Table(**stated | {"show": show})


def _strategies(stated: Mapping[str, Any], families: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    chosen = stated["strategies"]
    if isinstance(chosen, str):
        known = {**families, "all": [strategy for members in families.values() for strategy in members]}
        require(chosen in known, "strategies", chosen, f"a list, or one of {', '.join(known)}")
        chosen = [strategy for strategy in known[chosen] if f"strategy={strategy}" not in stated["leader"]]
    return tuple(chosen)


def _check_shown(text: str) -> None:
    try:
        names = fields_of(text)
        if unknown := sorted(names - {*FIELDS}):
            raise unknown_choice("show", unknown[0], FIELDS)
        text.format(**{name: Spread() if name in NUMBERS else "" for name in names})
    except UserError:
        raise
    except (AttributeError, ValueError) as error:
        raise UserError(f"show={text}: {error}") from error


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


def lead_markdown(lead: Lead, study: Study) -> tuple[str, str]:
    """Return the table with its caption and notes (wins, leads, gaps, runs without result), and the notes as text."""
    rows = []
    results = []
    comparisons = []
    lost = []
    labels = dict[str, str]()
    gaps = list[float]()
    for job in lead.rows:
        leading = run_table(study.cells(*lead.of_leader(job)), study.results)
        labels[LEADER] = names(leading, "strategy")[leading["strategy"].iloc[0]]
        times = {LEADER: times_by_seed(leading)}
        for given in lead.rivals:
            others = run_table(study.cells(*lead.of_rival(job, given)), study.results)
            for name, runs in others.groupby("strategy", sort=False):
                rival = ", ".join(filter(None, (names(others, "strategy")[str(name)], given)))
                times[rival] = times_by_seed(runs)
                labels[rival] = rival
        result = lead_of(times, LEADER)
        assert result
        done = leading[leading["status"] == "ok"]
        gaps.append(float((done[TIME] / done["cluster_bound_s"] - 1).mean()))
        gain = speedup(result.own.speedup) if result.own.speedup else ""
        shown = "" if math.isnan(gaps[-1]) else f"{100 * gaps[-1]:.0f}%"
        rows.append([job, result.rival, _seconds(result.other), _seconds(result.own), gain, shown])
        results.append(result)
        comparisons.append(compare(times, {}))
        lost += [f"{job}: {sentence}" for sentence in without_result(leading)]
    notes = [winners_sentence(comparisons, labels), lead_sentence(results, labels[LEADER])]
    if len(gaps) > 1 and not any(map(math.isnan, gaps)):
        notes.append(f"Its gap is {100 * median(gaps):.0f}% in the median and {100 * max(gaps):.0f}% at most.")
    heading = ["fastest of the others", "its s", f"{labels[LEADER]}, s", "speedup (95%)", "gap"]
    notes = [*filter(None, notes), *lost]
    return lead.captioned(heading, rows, heading[1:], notes), " ".join(notes)


def _seconds(standing: Standing) -> str:
    lacking = len(standing.times) - standing.num_ok
    failed = f"{lacking} of {len(standing.times)} without result" if lacking else ""
    return ", ".join(filter(None, [seconds(standing.time.mean) if standing.time else "", failed]))


def load_tables(config_dir: str | None = None) -> list[Table | Lead]:
    """Every table of ours, or of a folder of the user's, file by file.

    Leads of a folder know the families of its strategies, too.

    Raises:
        UserError: for one in a folder that is called as one of ours.
    """
    families = strategies_by_family(config_dir)

    def parse(name: str, values: Mapping[str, Any]) -> list[Table | Lead]:
        return [parse_table(name, values, families)]

    folder = Path(config_dir) if config_dir else config_tree()
    tables = [
        replace(table, file="" if config_dir else path.stem)
        for path in sorted((folder / "table").glob("*.yaml"))
        for table in read_definitions(path, "tables", parse)
    ]
    taken = {table.name for table in load_tables()} & {table.name for table in tables} if config_dir else set()
    if taken:
        raise UserError(f"{config_dir}: there is a table {min(taken)}; must have another name")
    return tables


def strategies_by_family(config_dir: str | None = None) -> dict[str, list[str]]:
    """Names of the strategies of every family that a strategy's YAML states; without those that no figure shows."""
    families: dict[str, list[str]] = {}
    for folder in (config_tree(), *([Path(config_dir)] if config_dir else [])):
        for path in sorted((folder / "strategy").glob("*.yaml")):
            stated = yaml.safe_load(path.read_text())
            if (family := stated.get("family")) and stated.get("in_figures") != IN_FIGURES[-1]:
                families.setdefault(str(family), []).append(path.stem)
    return families


def tables_output(table: Table | Lead | None = None) -> Output:
    """A table, or all of ours; each is read once."""
    tables = [table] if table else load_tables()
    sweeps = [sweep for definition in tables for sweep in definition.sweeps]
    # Tables with columns that only timelines tell.
    counting = [one for one in tables if isinstance(one, Table) and one.fields & {MICROBATCHES, SAMPLES}]
    counted = [sweep for one in counting for sweep in one.sweeps]

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
