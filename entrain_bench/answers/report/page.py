"""Parts of a page, and its rendering as self-contained HTML and as Markdown."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined

from entrain_bench.answers.text import markdown_table


@dataclass(frozen=True, slots=True)
class Text:
    """Content of a table's cell: text, whether it is bold, and the anchor it links to, if any."""

    text: str
    strong: bool = False
    link: str = ""


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
class Fact:
    """A named statement, and the command line that goes with it, if any."""

    name: str
    text: str
    command: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """Statements under each other, each with its name."""

    facts: Sequence[Fact]


@dataclass(frozen=True, slots=True)
class Image:
    """A picture."""

    png: bytes
    caption: str


# A text is a paragraph, a list of texts has a bullet each.
type Block = str | list[str] | Facts | Table | Commands | Image


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


# What Markdown would take for markup, but for the bar, which tables escape themselves.
MARKUP = re.compile(r"[\\`*_\[\]~$]")
# What GitHub takes for a person, and for an issue.
REFERENCES = re.compile(r"@(?=\w)|#(?=\d)")
# Letters that an issue has room for, with some for the words of whoever writes it; sections that are not folded.
MAX_LETTERS = 60_000
OPEN = 2


def html(page: Page) -> str:
    """One file: style and pictures inside, no scripts; every text is escaped."""
    loader = PackageLoader("entrain_bench.answers.report")
    environment = Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    environment.filters |= {
        "base64": lambda content: b64encode(content).decode(),
        "kind": lambda block: type(block).__name__,
    }
    return environment.get_template("page.html").render(page=page) + "\n"


def markdown(page: Page) -> str:
    """The same words for a GitHub issue: pictures are in the HTML only, sections after ``OPEN`` are folded.

    An issue has room for ``MAX_LETTERS``: sections that do not fit are left out, and named at the end.
    """
    text, left_out = f"# {_escaped(page.title)}\n", list[str]()
    for place, section in enumerate(page.sections):
        words = "\n".join(map(_block, section.blocks))
        title = f'<a id="{section.anchor}"></a>'
        if place < OPEN:
            part = f"\n{title}\n\n## {_escaped(section.title)}\n\n{words}"
        else:
            part = f"\n{title}\n\n<details>\n<summary>{_escaped(section.title)}</summary>\n\n{words}\n</details>\n"
        # Sections that are open answer; none of them is left out.
        if place < OPEN or len(text) + len(part) <= MAX_LETTERS:
            text += part
        else:
            left_out.append(_escaped(section.title))
    return text + (f"\nTo keep this short, only report.html has: {', '.join(left_out)}.\n" if left_out else "")


def _block(block: Block) -> str:
    match block:
        case str():
            return _escaped(block) + "\n"
        case Facts():
            return "".join(map(_fact, block.facts))
        case list():
            return "".join(f"- {_escaped(item)}\n" for item in block)
        case Table():
            rows = [[*map(_cell, cells)] for cells in block.rows]
            return markdown_table([*map(_escaped, block.heading)], rows, [*map(_escaped, block.right)])
        case Commands():
            # Commands as they are: a space within quotes counts.
            lines = "".join(f"    {line}\n" for line in block.lines)
            return f'<a id="{block.anchor}"></a>\n\n{_escaped(block.title)}\n\n{lines}'
        case Image():
            return f"*Figure, in the HTML page: {_escaped(block.caption)}*\n"


def _fact(fact: Fact) -> str:
    code = f"\n\n      {fact.command}\n" if fact.command else ""
    return f"- **{_escaped(fact.name)}**: {_escaped(fact.text)}{code}\n"


def _cell(cell: Text) -> str:
    text = _escaped(cell.text)
    text = f"**{text}**" if cell.strong and text else text
    return f"[{text}](#{cell.link})" if cell.link else text


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is."""
    safe = MARKUP.sub(r"\\\g<0>", " ".join(text.split()))
    safe = safe.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # GitHub would notify a person and link an issue.
    return REFERENCES.sub(r"\g<0><!-- -->", safe)
