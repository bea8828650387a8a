"""A table of measured numbers: which runs stand behind each of its cells, and what a cell shows of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from string import Formatter
from typing import Any

from entrain_bench.answers.documents.markdown import markdown_table
from entrain_bench.base.errors import UserError, require, unknown_choice
from entrain_bench.records.records import MEASURED, METRICS
from entrain_bench.run.study import SweepOverrides

KEYS = ("title", "common", "corner", "rows", "columns", "show")
GIB = "peak_memory_gib"
# Of a replica; and samples of an average one.
MICROBATCHES, SAMPLES = "num_microbatches", "samples_per_microbatch"
# Texts: degrees of every module; modules whose activations are recomputed.
DEGREES, RECOMPUTED = "degrees", "recomputed"
# A page shows what is the same for all, so no wall times.
NUMBERS = (*(name for name in METRICS if name not in MEASURED), GIB, MICROBATCHES, SAMPLES)
FIELDS = (*NUMBERS, DEGREES, RECOMPUTED)


@dataclass(frozen=True, slots=True)
class Spread:
    """A number over several runs, or over the replicas of several runs; formatted by itself it is the mean.

    The margin is half of the mean's 95% interval; not a number if there is one value only.
    """

    mean: float = 0.0
    median: float = 0.0
    least: float = 0.0
    most: float = 0.0
    margin: float = 0.0

    def __format__(self, spec: str) -> str:
        return format(self.mean, spec)


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """What all kinds of tables state.

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
        """A table below its title and the overrides that all runs share, and above its notes."""
        source = f"[{self.name}](../../experiments/table/{self.file}.yaml)" if self.file else self.name
        told = "".join(f"\n- {note}" for note in notes)
        caption = f"{self.title} ({source}: `{' '.join(self.common)}`).\n\n"
        return caption + markdown_table([self.corner, *heading], rows, right) + (f"{told}\n" if told else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table(Definition):
    """A table of measured numbers.

    Attributes:
        columns: overrides of each column, by its heading.
        show: what each column shows, by a further heading; texts with numbers in braces, as ``str.format`` takes them.
    """

    columns: Mapping[str, SweepOverrides]
    show: Mapping[str, str]

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

    Columns may be left out where there is one only, and what is shown may be one text.
    """
    stated = stated_fields(name, values, "columns", KEYS)
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
    title, common = " ".join(filled["title"].split()), tuple(filled["common"])
    return {**filled, **labels, "name": name, "title": title, "common": common}


def _labelled(values: Mapping[str, Any] | list[Mapping[str, Any]]) -> dict[str, SweepOverrides]:
    """Overrides by label; of a list of mappings every combination, with the labels joined by spaces."""
    listed = values if isinstance(values, list) else [values]
    return {
        " ".join(str(label) for label, _ in combination): tuple(text for _, texts in combination for text in texts)
        for combination in product(*(each.items() for each in listed))
    }
