"""What a page is made of, whatever it is written as."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """What a cell of a table says: plain words, whether they stand out, and the anchor that they lead to, if any."""

    text: str
    strong: bool = False
    link: str = ""


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A paragraph."""

    text: str


@dataclass(frozen=True, slots=True)
class Bullets:
    """A list."""

    items: Sequence[str]


@dataclass(frozen=True, slots=True)
class Table:
    """A table; columns whose heading is in ``right`` are aligned to the right."""

    heading: Sequence[str]
    rows: Sequence[Sequence[Text]]
    right: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Commands:
    """Command lines under a title that links lead to."""

    anchor: str
    title: str
    lines: Sequence[str]


@dataclass(frozen=True, slots=True)
class Image:
    """A picture."""

    png: bytes
    caption: str


type Block = Paragraph | Bullets | Table | Commands | Image


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page under a title that links lead to."""

    anchor: str
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True, slots=True)
class Page:
    """A title and sections, the most important first."""

    title: str
    sections: Sequence[Section]


def row(*values: str | Text) -> list[Text]:
    """A row of a table."""
    return [value if isinstance(value, Text) else Text(value) for value in values]
