"""Markdown text from plain values."""

from __future__ import annotations

from collections.abc import Sequence


def markdown_table(heading: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> str:
    """A table; columns whose heading is in ``right`` are aligned to the right."""
    rule = ["---:" if name in right else "---" for name in heading]
    lines = (_cells(row) for row in (heading, rule, *rows))
    return "\n".join(lines) + "\n"


def _cells(values: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(value.replace("|", "\\|").split()) for value in values) + " |"
