"""A page as self-contained HTML, and as Markdown."""

from __future__ import annotations

import re
from base64 import b64encode

from jinja2 import Environment, PackageLoader, StrictUndefined

from entrain_bench.answers.documents.markdown import markdown_table
from entrain_bench.answers.report.page import Block, Bullets, Commands, Image, Line, Page, Paragraph, Table

TEMPLATE = "page.html"
# What Markdown would take for markup, but for the bar, which tables escape themselves.
MARKUP = re.compile(r"[\\`*_\[\]~$]")


def html(page: Page) -> str:
    """One file: style and pictures inside, no scripts; every text is escaped."""
    environment = Environment(
        loader=PackageLoader("entrain_bench.answers.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["base64"] = lambda content: b64encode(content).decode()
    return environment.get_template(TEMPLATE).render(page=page) + "\n"


def markdown(page: Page) -> str:
    """The same words; pictures are in the HTML only."""
    parts = [f"# {escaped(page.title)}\n"]
    for section in page.sections:
        parts.append(f'<a id="{section.anchor}"></a>\n\n## {escaped(section.title)}\n')
        parts += map(_block, section.blocks)
    return "\n".join(parts)


def escaped(text: str) -> str:
    """Text that Markdown shows as it is."""
    safe = MARKUP.sub(r"\\\g<0>", " ".join(text.split()))
    return safe.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _block(block: Block) -> str:
    match block:
        case Paragraph():
            return _line(block.line) + "\n"
        case Bullets():
            return "".join(f"- {_line(item)}\n" for item in block.items)
        case Table():
            rows = [[_line([cell]) for cell in cells] for cells in block.rows]
            return markdown_table([escaped(name) for name in block.heading], rows, [*map(escaped, block.right)])
        case Commands():
            # Commands as they are: a space within quotes counts.
            lines = "".join(f"    {line}\n" for line in block.lines)
            return f'<a id="{block.anchor}"></a>\n\n{escaped(block.title)}\n\n{lines}'
        case Image():
            return f"*Figure, in the HTML page: {escaped(block.caption)}*\n"


def _line(line: Line) -> str:
    words = []
    for part in line:
        text = escaped(part.text)
        text = f"**{text}**" if part.strong and text else text
        words.append(f"[{text}](#{part.link})" if part.link else text)
    return " ".join(words)
