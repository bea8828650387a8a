"""Claims in words: the page with all verdicts, a page per paper with every detail, and the same in a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from entrain_bench.answers.commands import sweep_command
from entrain_bench.answers.documents.agreement import mismatches
from entrain_bench.answers.documents.claim import GAIN, LEVEL, LIMIT, Claim, cited
from entrain_bench.answers.text import count, markdown_table

INDEX = "claims.md"
PAGES = "claims"
VERDICTS = (
    *("reproduced", "exceeds", "partly", "not reproduced"),
    *("setting not reproduced", "undecided", "no source", "not measured"),
)
# In a claim's value, what other choices gave; shown with the details only.
UNDER_OTHER_CHOICES = "under other choices"
# Of ``claims.csv``.
type Row = Mapping[str, Any]
# What stands above the tables.
INTRODUCTION = Path(__file__).parent / "templates" / "claims.md"


def claims_markdown(claims: Sequence[Claim], rows: Sequence[Row]) -> str:
    """``claims.md``: the counts, the rules, and for every paper a table with a row per claim."""
    heading = ["claim", "where", "paper", "as published", "verdict", "fair", "verdict, fair"]
    parts = [f"# {counts(rows)}"]
    for title, kinds in (("Gains and orders", (GAIN,)), ("Levels and limits", (LEVEL, LIMIT))):
        own = [row for claim, row in zip(claims, rows, strict=True) if claim.judged_by in kinds]
        parts += [f"{title}: {counts(own)}."] if own else []
    parts += [agreement_text(claims) + ".", INTRODUCTION.read_text()]
    for file, group in _by_file(claims, rows):
        shown = []
        for matrix, cases in _by_matrix(group):
            name, row = (matrix, _summary(cases)) if matrix else (cases[0][1]["name"], cases[0][1])
            words = (row["where"], row["paper_value"], plain_value(row), row["published_verdict"])
            link = f"[{row['claim']}]({PAGES}/{file}.md#{name})"
            shown.append([link, *words, row["fair_value"], row["fair_verdict"]])
        title = f"## [{group[0][0].system}]({PAGES}/{file}.md), {counts([row for _, row in group])}"
        parts += [title, markdown_table(heading, shown)]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def counts_markdown(claims: Sequence[Claim], rows: Sequence[Row]) -> str:
    """Return in two sentences how many claims are reproduced and how many are not, for pages that show no claim."""

    def ends(name: str) -> str:
        number = _verdicts(rows, name)
        others = number.total() - sum(number[each] for each in clear)
        return f"{', '.join(f'{number[each]} {each}' for each in clear)}, {others} in between or undecided"

    clear = ("reproduced", "exceeds", "not reproduced")
    papers = {claim.file for claim in claims}
    return (
        f"{count(len(rows), 'claim')} of {count(len(papers), 'paper')}. As published: {ends('published')}. "
        f"Comparisons of speed under equal tuning: {ends('fair')}.\n"
    )


def claims_pages(claims: Sequence[Claim], rows: Sequence[Row]) -> dict[str, str]:
    """The page of every paper by its path beside ``claims.md``: a section per claim with details and commands."""
    pages = {}
    for file, group in _by_file(claims, rows):
        parts = [f"# {group[0][0].system}, {counts([row for _, row in group])}"]
        parts.append(f"[All claims](../{INDEX}) explains the verdicts. Generated from `experiments/claim/{file}.yaml`.")
        for matrix, cases in _by_matrix(group):
            claim, row = cases[0]
            parts.append(f"## {matrix or claim.name}")
            if matrix:
                heading = ["case", "cells", "paper", "as published", "verdict", "fair", "verdict, fair"]
                parts += [f"{claim.title}. The first case stands for all:", markdown_table(heading, _case_rows(cases))]
            details = "\n".join(f"- *{label}*: {text}" for label, text in claim_details(row))
            lines = "\n".join(f"# {label}\n{command}" for label, command in claim_commands(claim))
            parts += [details, f"```sh\n{lines}\n```"]
        pages[f"{PAGES}/{file}.md"] = "\n\n".join(parts) + "\n"
    return pages


def claim_text(claim: Claim, row: Row) -> str:
    """One claim's details and commands for a terminal."""
    lines = [claim.name, *(f"  {label}: {text}" for label, text in claim_details(row)), ""]
    return "\n".join(lines + [f"# {label}\n{command}" for label, command in claim_commands(claim)])


def claims_text(claims: Sequence[Claim], rows: Sequence[Row]) -> str:
    """For every paper a line per claim with its verdicts, then all counts and mismatches, for a terminal."""
    lines = []
    width = max(len(claim.name) for claim in claims)
    for _, group in _by_file(claims, rows):
        lines += [f"{group[0][0].system}, {counts([row for _, row in group])}"]
        for claim, row in group:
            fair = f" | fair {row['fair_value']} {row['fair_verdict']}" if claim.fair else ""
            found = f"{plain_value(row)} {row['published_verdict']}{fair}"
            lines.append(f"  {claim.name:{width}}  {row['paper_value']}: {found}")
        lines.append("")
    return "\n".join([*lines, counts(rows), agreement_text(claims)])


def agreement_text(claims: Sequence[Claim]) -> str:
    """How many claims say otherwise than the cells that they name, and which; of how many claims and cells."""
    found = [(claim.name, text) for claim in claims for text in mismatches(claim)]
    cells = {cell.id for claim in claims for cell in (*claim.cells, *claim.per)}
    own = sum(bool(claim.cells) for claim in claims)
    lines = [f"{name}: {text}" for name, text in found]
    return "\n".join([*lines, f"{len(found)} mismatches between {own} claims and {len(cells)} published cells"])


def claim_details(row: Row) -> Iterator[tuple[str, str]]:
    """Return the details of a claim, by label."""
    yield "Claim", f"{row['claim']}: {row['paper_value']} ({cited(row['paper'])}, {row['where']})"
    yield "Paper", row["paper_setting"]
    yield "As published", f"{_found(row, 'published')}. {row['published_setting']}"
    if row["other_choices"]:
        yield "Other choices", f"{row['other_choices']}."
    if row["fair_setting"]:
        yield "Fair", f"{_found(row, 'fair')}. {row['fair_setting']}"
    if row["assumption"]:
        yield "What decides", f"{decides(row)}."
    if row["why"]:
        yield "Why", row["why"]


def claim_commands(claim: Claim) -> list[tuple[str, str]]:
    """The command of every sweep, once, with the setting and the side that it is of."""
    settings = {"as published": claim.published, **({"fair": claim.fair} if claim.fair else {})}
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
    fair = tally(rows, "fair")
    return f"{count(len(rows), 'claim')}: as published {tally(rows, 'published')}" + (f"; fair {fair}" if fair else "")


def tally(rows: Iterable[Row], name: str) -> str:
    """How many rows have each verdict in a setting; those without the setting do not count."""
    number = _verdicts(rows, name)
    known = [*VERDICTS, *sorted({*number} - {*VERDICTS})]
    return ", ".join(f"{number[each]} {each}" for each in known if number[each])


def _verdicts(rows: Iterable[Row], name: str) -> Counter[str]:
    found = (row[f"{name}_verdict"].partition(":")[0].partition(";")[0] for row in rows)
    return Counter(verdict for verdict in found if verdict)


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


def _by_matrix(group: Sequence[tuple[Claim, Row]]) -> Iterator[tuple[str, list[tuple[Claim, Row]]]]:
    """Claims with their rows: all cases of a matrix together, any other by itself (without a name)."""
    matrices: dict[str, list[tuple[Claim, Row]]] = {}
    for claim, row in group:
        matrices.setdefault(claim.group or f"={claim.name}", []).append((claim, row))
    for name, cases in matrices.items():
        yield ("" if name.startswith("=") else name), cases


def _summary(cases: Sequence[tuple[Claim, Row]]) -> Row:
    """One row for all cases of a matrix."""
    first = cases[0][0]
    rows = [row for _, row in cases]
    values = [value for claim, _ in cases for value in claim.value]
    places = dict.fromkeys(cell.where.partition(",")[0] for claim, _ in cases for cell in claim.cells)
    return {
        "claim": f"{first.title} ({len(cases)} cells)",
        "where": "; ".join(places),
        "paper_value": first.format((min(values), max(values)) if values else ()),
        "published_value": "",
        "published_verdict": tally(rows, "published"),
        "fair_value": "",
        "fair_verdict": tally(rows, "fair"),
    }


def _case_rows(cases: Sequence[tuple[Claim, Row]]) -> list[list[str]]:
    return [
        [
            claim.name,
            " ".join(cell.id for cell in claim.cells),
            *(row["paper_value"], row["published_value"], row["published_verdict"]),
            *(row["fair_value"], row["fair_verdict"]),
        ]
        for claim, row in cases
    ]
