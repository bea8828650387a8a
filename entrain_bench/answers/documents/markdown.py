"""Markdown text from plain values."""

from __future__ import annotations

from collections.abc import Sequence


def markdown_table(heading: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> str:
    """A table; columns whose heading is in ``right`` are aligned to the right."""
    rule = ["---:" if name in right else "---" for name in heading]
    lines = ([" ".join(cell.replace("|", "\\|").split()) for cell in row] for row in (heading, rule, *rows))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
