"""Measured tables of ``experiments/table``, their Markdown, and how pages of ``docs`` take them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import product
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
from entrain_bench.base.errors import require, unknown_choice
from entrain_bench.base.files import write_atomically
from entrain_bench.config.compose import IN_FIGURES
from entrain_bench.config.tree import config_tree
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import Results
from entrain_bench.run.study import Output, Study, SweepOverrides

# Folder of the tables in results, and end of the name of the file with a lead's sentences alone.
TABLES = "tables"
SENTENCES = "_sentences"
# A table's place on a page.
PLACE = re.compile(r"(<!-- table: (\S+) -->).*?(<!-- end -->)", re.DOTALL)
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
    """The fields that all kinds of tables have; ``corner`` is the heading of the first column, ``file`` the YAML."""

    name: str
    title: str
    common: SweepOverrides
    corner: str
    rows: Mapping[str, SweepOverrides]
    file: str

    def captioned(
        self, heading: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str], notes: Iterable[str]
    ) -> str:
        """Return a table below its title and the overrides that all runs share, and above its notes."""
        source = f"[{self.name}]({WAY_UP}experiments/table/{self.file}.yaml)"
        listed = "".join(f"\n- {note}" for note in notes)
        # Sentences of their own: the check of words reads titles alone.
        caption = f"{self.title}. Runs of {source}: `{' '.join(self.common)}`.\n\n"
        return caption + markdown_table([self.corner, *heading], rows, right) + (f"{listed}\n" if listed else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table(Definition):
    """A table of measured numbers.

    Attributes:
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
        return {name for text in self.show.values() for name in _fields(text)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lead(Definition):
    """A table of the speedups of one strategy (``leader``) over the fastest of others; its rows are jobs.

    Attributes:
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


def _fields(text: str) -> set[str]:
    """Names in the braces of a text, without what follows a dot."""
    return {name.partition(".")[0] for _, name, _, _ in Formatter().parse(text) if name is not None}


def parse_table(name: str, values: Mapping[str, Any], file: str) -> Table | Lead:
    """A table from plain values; with ``leader`` it is a lead.

    What is in ``USUAL`` may be left out, ``show`` may be one text, and ``strategies`` is a list of names, one of the
    families, or ``all`` but the leader. Raises ``UserError`` for an unknown or missing key.
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
    stated |= {"name": name, "title": words(stated["title"]), "file": file}
    if is_lead:
        return Lead(**stated | {"strategies": _strategies(stated["strategies"], stated["leader"])})
    show = stated["show"]
    return Table(**stated | {"show": show if isinstance(show, Mapping) else {"": show}})


def _strategies(stated: Sequence[str] | str, leader: SweepOverrides) -> Sequence[str]:
    """The names that a list or a family stands for; those without a family are in no figure."""
    if not isinstance(stated, str):
        return stated
    families = strategies_by_family()
    known = [name for family, members in families.items() if stated in ("all", family) for name in members]
    return [name for name in known if f"strategy={name}" not in leader]


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


def load_tables() -> list[Table | Lead]:
    """Every table, file by file; ``UserError`` naming a file and a table that is malformed."""

    def parse(file: str, name: str, values: Mapping[str, Any]) -> list[Table | Lead]:
        return [parse_table(name, values, file)]

    return [
        table
        for path in sorted((config_tree() / "table").glob("*.yaml"))
        for table in read_definitions(path, "tables", partial(parse, path.stem))
    ]


def strategies_by_family() -> dict[str, list[str]]:
    """Names of the strategies of every family that a strategy's YAML states; without those that no figure shows."""
    families: dict[str, list[str]] = {}
    for path in sorted((config_tree() / "strategy").glob("*.yaml")):
        stated = yaml.safe_load(path.read_text())
        if (family := stated.get("family")) and stated.get("in_figures") != IN_FIGURES[-1]:
            families.setdefault(str(family), []).append(path.stem)
    return families


def tables_output() -> Output:
    """All tables."""
    tables = load_tables()
    # Tables with columns that only timelines tell.
    counting = [one for one in tables if isinstance(one, Table) and one.fields & {MICROBATCHES, SAMPLES}]
    return Output(
        "tables",
        [sweep for table in tables for sweep in table.sweeps],
        lambda study: write_tables(tables, study),
        timelines=lambda study: [[cell] for table in counting for cell in study.cells_by_key(table.sweeps).values()],
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
    right = [heading for heading, text in shows.items() if DEGREES not in _fields(text)]
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
        begin, name, end = match.groups()
        if name not in tables:
            raise unknown_choice("table", name, tables)
        return f"{begin}\n\n{tables[name].strip('\n').replace(f']({WAY_UP}', f']({way_up}')}\n\n{end}"

    return PLACE.sub(put, page_text)
