"""Claims in words: the page with all verdicts, a page per paper with every detail, and the same in a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from entrain_bench.answers.commands import sweep_command
from entrain_bench.answers.documents.claim import Claim
from entrain_bench.answers.text import markdown_table

INDEX, PAGES = "claims.md", "claims"
VERDICTS = ("reproduced", "partly", "not reproduced", "undecided", "no source")
# In a claim's value, what other choices gave; shown with the details only.
UNDER_OTHER_CHOICES = "under other choices"
# Of ``claims.csv``.
type Row = Mapping[str, Any]
# What stands above the tables.
INTRODUCTION = Path(__file__).parent / "templates" / "claims.md"


def claims_markdown(claims: Sequence[Claim], rows: Sequence[Row]) -> str:
    """``claims.md``: the counts, the rules, and for every paper a table with a row per claim."""
    heading = ["claim", "where", "paper", "as published", "verdict", "fair", "verdict, fair"]
    parts = [f"# {counts(rows)}", INTRODUCTION.read_text()]
    for file, group in _by_file(claims, rows):
        shown = []
        for _, row in group:
            words = (row["where"], row["paper_value"], plain_value(row), row["published_verdict"])
            link = f"[{row['claim']}]({PAGES}/{file}.md#{row['name']})"
            shown.append([link, *words, row["fair_value"], row["fair_verdict"]])
        title = f"## [{group[0][0].system}]({PAGES}/{file}.md), {counts([row for _, row in group])}"
        parts += [title, markdown_table(heading, shown)]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def claims_pages(claims: Sequence[Claim], rows: Sequence[Row]) -> dict[str, str]:
    """The page of every paper by its path beside ``claims.md``: a section per claim with details and commands."""
    pages = {}
    for file, group in _by_file(claims, rows):
        parts = [f"# {group[0][0].system}, {counts([row for _, row in group])}"]
        parts.append(f"[All claims](../{INDEX}) explains the verdicts. Generated from `experiments/claim/{file}.yaml`.")
        for claim, row in group:
            details = "\n".join(f"- *{label}*: {text}" for label, text in claim_details(row))
            lines = "\n".join(f"# {label}\n{command}" for label, command in claim_commands(claim))
            parts += [f"## {claim.name}", details, f"```sh\n{lines}\n```"]
        pages[f"{PAGES}/{file}.md"] = "\n\n".join(parts) + "\n"
    return pages


def claim_text(claim: Claim, row: Row) -> str:
    """One claim's details and commands for a terminal."""
    lines = [claim.name, *(f"  {label}: {text}" for label, text in claim_details(row)), ""]
    return "\n".join(lines + [f"# {label}\n{command}" for label, command in claim_commands(claim)])


def claims_text(claims: Sequence[Claim], rows: Sequence[Row]) -> str:
    """The counts, and for every paper a line per claim with its verdicts, for a terminal."""
    lines = [counts(rows)]
    width = max(len(claim.name) for claim in claims)
    for _, group in _by_file(claims, rows):
        lines += ["", f"{group[0][0].system}, {counts([row for _, row in group])}"]
        lines += [
            f"  {claim.name:{width}}  {row['paper_value']}: {plain_value(row)} {row['published_verdict']}"
            f" | fair {row['fair_value']} {row['fair_verdict']}"
            for claim, row in group
        ]
    return "\n".join(lines)


def claim_details(row: Row) -> Iterator[tuple[str, str]]:
    """What is known of a claim, by label."""
    yield "Claim", f"{row['claim']}: {row['paper_value']} (arXiv:{row['paper']}, {row['where']})"
    yield "Paper", row["paper_setting"]
    yield "As published", f"{_found(row, 'published')}. {row['published_setting']}"
    if row["other_choices"]:
        yield "Other choices", f"{row['other_choices']}."
    yield "Fair", f"{_found(row, 'fair')}. {row['fair_setting']}"
    if row["assumption"]:
        yield "What decides", f"{decides(row)}."
    if row["why"]:
        yield "Why", row["why"]


def claim_commands(claim: Claim) -> list[tuple[str, str]]:
    """The command of every sweep, once, with the setting and the side that it is of."""
    settings = {"as published": claim.published, "fair": claim.fair}
    settings |= {f"other choice: {label}": each for label, each in claim.choices.items()}
    if claim.toggled and claim.assumption:
        settings[f"otherwise: {claim.assumption.otherwise}"] = claim.toggled
    labels: dict[str, str] = {}
    for label, setting in settings.items():
        for sweep in setting.sweeps:
            labels.setdefault(sweep_command(sweep, claim.config_dir), label)
    return [(label, command) for command, label in labels.items()]


def counts(rows: Iterable[Row]) -> str:
    """How many claims there are, and how many have each verdict as published and fair."""
    rows = [*rows]
    found = []
    for title, name in (("as published", "published"), ("fair", "fair")):
        number = Counter(row[f"{name}_verdict"].partition(":")[0].partition(";")[0] for row in rows)
        known = [*VERDICTS, *sorted({*number} - {*VERDICTS})]
        found.append(f"{title} " + ", ".join(f"{number[each]} {each}" for each in known if number[each]))
    return f"{len(rows)} claim{'s' * (len(rows) != 1)}: {'; '.join(found)}"


def plain_value(row: Row) -> str:
    """The number as published, without what other choices gave."""
    parts = str(row["published_value"]).split("; ")
    return "; ".join(part for part in parts if UNDER_OTHER_CHOICES not in part)


def decides(row: Mapping[Any, Any]) -> str:
    """The assumption that decides a claim, and what comes out where it is otherwise."""
    if not row["assumption"]:
        return "not toggled"
    return f"{row['assumption']}: {_found(row, 'otherwise')}"


def _found(row: Mapping[Any, Any], name: str) -> str:
    return f"{row[f'{name}_value'] or 'nothing'} ({row[f'{name}_verdict']})"


def _by_file(claims: Sequence[Claim], rows: Sequence[Row]) -> Iterator[tuple[str, list[tuple[Claim, Row]]]]:
    """Claims with their rows, by the name of their file."""
    ordered = sorted(zip(claims, rows, strict=True), key=lambda pair: pair[0].file)
    for file, group in groupby(ordered, key=lambda pair: pair[0].file):
        yield file, [*group]
