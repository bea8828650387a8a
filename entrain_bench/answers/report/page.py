"""What a page is made of, whatever it is written as."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Text:
    """Words of a line.

    Attributes:
        text: plain; renderers escape them.
        strong: whether they stand out.
        link: the anchor on the page that they lead to; empty for none.
    """

    text: str
    strong: bool = False
    link: str = ""


type Line = Sequence[Text]


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A paragraph."""

    kind: ClassVar[str] = "paragraph"
    line: Line


@dataclass(frozen=True, slots=True)
class Bullets:
    """A list."""

    kind: ClassVar[str] = "bullets"
    items: Sequence[Line]


@dataclass(frozen=True, slots=True)
class Table:
    """A table; columns whose heading is in ``right`` are aligned to the right."""

    kind: ClassVar[str] = "table"
    heading: Sequence[str]
    rows: Sequence[Line]
    right: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Commands:
    """Command lines under a title that links lead to."""

    kind: ClassVar[str] = "commands"
    anchor: str
    title: str
    lines: Sequence[str]


@dataclass(frozen=True, slots=True)
class Image:
    """A picture."""

    kind: ClassVar[str] = "image"
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


def plain(text: str) -> Paragraph:
    """A paragraph of plain words."""
    return Paragraph((Text(text),))


def row(*values: str | Text) -> Line:
    """A row of a table."""
    return tuple(value if isinstance(value, Text) else Text(value) for value in values)
