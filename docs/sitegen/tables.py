"""HTML tables that a reader filters and sorts (``static/table.js``); without scripts the whole table stays readable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True, slots=True)
class Column:
    """A column.

    Attributes:
        heading: what stands above it.
        filtered: whether readers choose among its values.
        numbers: whether it is sorted by ``Cell.value``.
    """

    heading: str
    filtered: bool = False
    numbers: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell.

    Attributes:
        text: what it says.
        link: where it leads, relative to the page; empty for nowhere.
        value: what it is sorted and filtered by; None: its text.
        strong: whether it is bold.
    """

    text: str
    link: str = ""
    value: float | str | None = None
    strong: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A row: its anchor on the page, its cells, and the commands that make it again."""

    anchor: str
    cells: Sequence[Cell]
    commands: Sequence[str]


def html_table(name: str, columns: Sequence[Column], rows: Sequence[Row]) -> str:
    """Return a table with controls above it, as a raw block of MyST."""
    controls = [
        f'<label>Search <input type="search" data-table="{name}" placeholder="words"></label>',
        *(_select(name, index, column, rows) for index, column in enumerate(columns) if column.filtered),
        f'<span class="count" data-count="{name}">{len(rows)} rows</span>',
    ]
    heads = "".join(
        f'<th scope="col" data-numbers="{int(column.numbers)}">{escape(column.heading)}</th>' for column in columns
    )
    lines = [
        f'<div class="table-controls">{"".join(controls)}</div>',
        f'<div class="table-scroll"><table class="interactive" id="{name}">',
        f'<thead><tr>{heads}<th scope="col" class="unsorted">command</th></tr></thead>',
        "<tbody>",
        *map(_row, rows),
        "</tbody></table></div>",
    ]
    return raw("\n".join(lines))


def raw(html: str) -> str:
    """HTML as a block of MyST that Sphinx passes through; it must have no line of backticks."""
    return f"````{{raw}} html\n{html}\n````\n"


def markdown(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A plain table."""
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def facts(entries: Mapping[str, str]) -> str:
    """A table of names and texts without a heading; empty texts are left out."""
    rows = [f"* - {name}\n  - {text}" for name, text in entries.items() if text]
    return "\n".join([":::{list-table}", ":stub-columns: 1", ":widths: 20 80", "", *rows, ":::"])


def _select(name: str, index: int, column: Column, rows: Sequence[Row]) -> str:
    values = sorted({_key(row.cells[index]) for row in rows})
    options = "".join(f"<option>{escape(value)}</option>" for value in values if value)
    select = f'<select data-table="{name}" data-column="{index}"><option value="">all</option>{options}</select>'
    return f"<label>{escape(column.heading)} {select}</label>"


def _row(row: Row) -> str:
    anchor = f' id="{escape(row.anchor)}"' if row.anchor else ""
    commands = "\n".join(row.commands)
    shown = f"<details><summary>show</summary><pre>{escape(commands)}</pre></details>"
    cells = "".join(map(_cell, row.cells))
    return f'<tr{anchor}>{cells}<td class="command"><button type="button" hidden>copy</button>{shown}</td></tr>'


def _cell(cell: Cell) -> str:
    text = escape(cell.text)
    if cell.link:
        text = f'<a href="{escape(cell.link)}">{text}</a>'
    if cell.strong:
        text = f"<strong>{text}</strong>"
    key = "" if cell.value is None else f' data-value="{escape(_key(cell))}"'
    return f"<td{key}>{text}</td>"


def _key(cell: Cell) -> str:
    return cell.text if cell.value is None else f"{cell.value:g}" if isinstance(cell.value, float) else cell.value
