"""Tables of measured numbers, and of one strategy next to the fastest of its rivals: what their YAMLs state."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from string import Formatter
from typing import Any

import pandas as pd

from entrain_bench.answers.comparison import TIME, Standing, compare, lead_of
from entrain_bench.answers.labels import names
from entrain_bench.answers.sentences import lead_sentence, winners_sentence
from entrain_bench.answers.tables import run_table, times_by_seed, without_result
from entrain_bench.answers.text import markdown_table, seconds, speedup
from entrain_bench.base.errors import UserError, require, unknown_choice
from entrain_bench.records.records import MEASURED, METRICS
from entrain_bench.run.study import Study, SweepOverrides

KEYS = ("title", "common", "corner", "rows", "columns", "show", "over")
GIB = "peak_memory_gib"
# From the pages of most tables to the top of the repository.
WAY_UP = "../../"
SEED = "seed"
# Of a replica; and samples of an average one.
MICROBATCHES = "num_microbatches"
SAMPLES = "samples_per_microbatch"
# Texts: degrees of every module; modules whose activations are recomputed.
DEGREES = "degrees"
RECOMPUTED = "recomputed"
# A page shows what is the same for all, so no wall times.
NUMBERS = (*(name for name in METRICS if name not in MEASURED), GIB, MICROBATCHES, SAMPLES)
FIELDS = (*NUMBERS, DEGREES, RECOMPUTED)


@dataclass(frozen=True, slots=True)
class Spread:
    """A number over several runs, seeds apart or averaged, or over replicas; formatted by itself it is the mean.

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
        corner: heading of the first column: what the rows are.
        rows: overrides of each row, by what stands before it.
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
        told = "".join(f"\n- {note}" for note in notes)
        # Sentences of their own: the check of words reads titles alone.
        caption = f"{self.title}. Runs of {source}: `{' '.join(self.common)}`.\n\n"
        return caption + markdown_table([self.corner, *heading], rows, right) + (f"{told}\n" if told else "")


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
        return [self.sweep(row, column) for row in self.rows for column in self.columns]

    @property
    def fields(self) -> set[str]:
        """Everything that its cells show."""
        return {name for text in self.show.values() for name in fields_of(text)}


def fields_of(text: str) -> set[str]:
    """Names in the braces of a text, what follows a dot left out."""
    return {name.partition(".")[0] for _, name, _, _ in Formatter().parse(text) if name is not None}


def parse_table(name: str, values: Mapping[str, Any]) -> Table:
    """A table from plain values; checks keys and what is shown.

    Columns may be left out where there is one only, what is shown may be one text, and ``over`` is usually the seed.
    """
    stated = stated_fields(name, {"over": SEED, **values}, "columns", KEYS)
    show = stated["show"] if isinstance(stated["show"], Mapping) else {"": stated["show"]}
    for text in show.values():
        try:
            for field in fields_of(text):
                if field not in FIELDS:
                    raise unknown_choice("show", field, FIELDS)
            text.format(**{field: Spread() if field in NUMBERS else "" for field in FIELDS})
        except (AttributeError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"show={text}: {error}") from error
    return Table(**stated | {"show": show})


def stated_fields(name: str, values: Mapping[str, Any], optional: str, keys: Sequence[str]) -> dict[str, Any]:
    """The fields of a table from plain values; ``optional`` are overrides by label that may be left out.

    Raises:
        UserError: for a key that is unknown or missing.
    """
    filled = {optional: {"": []}, **values}
    for key in sorted({*keys} ^ {*filled}):
        require(key in keys, "key", key, f"one of {', '.join(keys)}")
        raise UserError(f"{key}: missing")
    labels = {key: _labelled(filled[key]) for key in ("rows", optional)}
    title = " ".join(filled["title"].split())
    common = tuple(filled["common"])
    return {**filled, **labels, "name": name, "title": title, "common": common}


def _labelled(values: Mapping[str, Any] | list[Mapping[str, Any]]) -> dict[str, SweepOverrides]:
    """Overrides by label; of a list of mappings every combination, with the labels joined by spaces."""
    listed = values if isinstance(values, list) else [values]
    return {
        " ".join(str(label) for label, _ in combination): tuple(text for _, texts in combination for text in texts)
        for combination in product(*(each.items() for each in listed))
    }


LEAD_KEYS = ("title", "common", "corner", "rows", "leader", "strategies", "rivals")
# The strategy that leads; rivals are called by their strategy and label.
LEADER = ""
# All strategies of all families but the leader.
ALL = "all"


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


def parse_lead(name: str, values: Mapping[str, Any], families: Mapping[str, Sequence[str]]) -> Lead:
    """A lead from plain values; ``strategies`` is a list of names, one of the families, or ``all`` but the leader.

    Rivals may be left out.

    Raises:
        UserError: for a key that is unknown or missing, and an unknown family.
    """
    stated = stated_fields(name, values, "rivals", LEAD_KEYS)
    chosen = stated["strategies"]
    if isinstance(chosen, str):
        known = {**families, ALL: [each for members in families.values() for each in members]}
        require(chosen in known, "strategies", chosen, f"a list, or one of {', '.join(known)}")
        chosen = [each for each in known[chosen] if f"strategy={each}" not in stated["leader"]]
    return Lead(**stated | {"leader": tuple(stated["leader"]), "strategies": tuple(chosen)})


def lead_markdown(lead: Lead, study: Study) -> tuple[str, str]:
    """Return the table with its caption and notes (wins, leads, gaps, runs without result), and the notes as text."""
    rows = []
    results = []
    comparisons = []
    notes = []
    labels = dict[str, str]()
    all_gaps = list[float]()
    for job in lead.rows:
        own = run_table(study.cells(*lead.of_leader(job)), study.results)
        labels[LEADER] = names(own, "strategy")[own["strategy"].iloc[0]]
        found = {LEADER: times_by_seed(own)}
        for given in lead.rivals:
            others = run_table(study.cells(*lead.of_rival(job, given)), study.results)
            called = names(others, "strategy")
            for name, mine in others.groupby("strategy", sort=False):
                rival = ", ".join(filter(None, (called[str(name)], given)))
                found[rival] = times_by_seed(mine)
                labels[rival] = rival
        result = lead_of(found, LEADER)
        assert result
        done = own[own["status"] == "ok"]
        gap = float((done[TIME] / done["cluster_bound_s"] - 1).mean())
        gain = speedup(result.own.speedup) if result.own.speedup else ""
        shown = "" if math.isnan(gap) else f"{100 * gap:.0f}%"
        rows.append([job, result.rival, _seconds(result.other), _seconds(result.own), gain, shown])
        results.append(result)
        comparisons.append(compare(found, {}))
        all_gaps.append(gap)
        notes += [f"{job}: {sentence}" for sentence in without_result(own)]
    told = [winners_sentence(comparisons, labels), lead_sentence(results, labels[LEADER])]
    if len(all_gaps) > 1 and not any(map(math.isnan, all_gaps)):
        median, greatest = (100 * statistic for statistic in (pd.Series(all_gaps).median(), max(all_gaps)))
        told.append(f"Its gap is {median:.0f}% in the median and {greatest:.0f}% at most.")
    heading = ["fastest of the others", "its s", f"{labels[LEADER]}, s", "speedup (95%)", "gap"]
    notes = [*filter(None, told), *notes]
    return lead.captioned(heading, rows, heading[1:], notes), " ".join(notes)


def _seconds(standing: Standing) -> str:
    lacking = len(standing.times) - standing.num_ok
    failed = f"{lacking} of {len(standing.times)} without result" if lacking else ""
    return ", ".join(filter(None, [seconds(standing.time.mean) if standing.time else "", failed]))
