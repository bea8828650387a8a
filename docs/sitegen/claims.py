"""The page of claims: a summary, and one table with every claim, its verdicts and its commands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from entrain_bench.answers.documents.claim import Claim
from entrain_bench.answers.documents.claim_pages import VERDICTS, claim_commands, plain_value
from entrain_bench.answers.documents.claims import NOT_MEASURED, TABLE, load_claims, read_rows
from sitegen.tables import Cell, Column, Row, html_table, markdown

COLUMNS = (
    *(Column("paper", filtered=True), Column("kind", filtered=True), Column("claim")),
    *(Column("published", numbers=True), Column("here", numbers=True), Column("verdict", filtered=True)),
    *(Column("fair", numbers=True), Column("verdict, fair", filtered=True)),
)
# Above it the committed page explains the verdicts; from here on it lists the claims, as the table does.
FIRST_LIST = "\n## ["
# Commands of a row: those of the settings that have a verdict in it.
SETTINGS = ("as published", "fair")


def claims_page(committed: str, root: Path) -> str:
    """Return the page.

    Args:
        committed: the text of ``docs/claims.md``.
        root: the repository.
    """
    claims = load_claims()
    rows = read_rows(claims, root / "results" / "reference" / TABLE)
    introduction = committed.partition(FIRST_LIST)[0]
    title, _, rest = introduction.partition("\n")
    parts = [
        "# Claims of the papers, checked",
        f"{title.removeprefix('# ')}.",
        "## Verdicts as published, by paper",
        _summary(claims, rows),
        "## All claims",
        "Click a heading to sort. A claim's name leads to its settings, to other choices and to the assumption that "
        "decides. Copy a command to run both sides of a claim.",
        html_table("claims", COLUMNS, [*map(_row, claims, rows)]),
        "## How verdicts are made",
        rest.strip(),
        "\n".join(
            [
                "```{toctree}",
                ":hidden:",
                "",
                *dict.fromkeys(f"{claim.system} <claims/{claim.file}>" for claim in claims),
                "```",
            ]
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _summary(claims: Sequence[Claim], rows: Sequence[Mapping[str, str]]) -> str:
    counts: dict[str, Counter[str]] = {}
    for claim, row in zip(claims, rows, strict=True):
        counts.setdefault(claim.system, Counter())[verdict(row["published_verdict"])] += 1
    shown = [name for name in VERDICTS if any(name in each for each in counts.values())]
    pages = {claim.system: claim.file for claim in claims}
    lines = [
        [f"[{system}](claims/{pages[system]}.md)", *(str(count[name] or "") for name in shown), str(count.total())]
        for system, count in counts.items()
    ]
    return markdown(["paper", *shown, "all"], lines)


def _row(claim: Claim, row: Mapping[str, str]) -> Row:
    published = verdict(row["published_verdict"])
    fair = verdict(row["fair_verdict"])
    cells = (
        *(Cell(claim.system), Cell(claim.judged_by)),
        Cell(f"{row['claim']} ({row['where']})", link=f"claims/{claim.file}.html#{anchor(claim)}"),
        Cell(row["paper_value"], value=first_number(row["paper_value"])),
        Cell(plain_value(row), value=first_number(row["published_value"])),
        Cell(_shown(row["published_verdict"]), value=published, strong=published == VERDICTS[0]),
        Cell(row["fair_value"], value=first_number(row["fair_value"])),
        Cell(_shown(row["fair_verdict"]), value=fair),
    )
    return Row(claim.name, cells, [command for label, command in claim_commands(claim) if label in SETTINGS])


def anchor(claim: Claim) -> str:
    """The heading of a claim, or of its matrix, on its paper's page, as docutils spells it."""
    return (claim.group or claim.name).replace("_", "-").lower()


def _shown(text: str) -> str:
    """A verdict with what other choices gave; of a claim without runs no reason."""
    return NOT_MEASURED if verdict(text) == NOT_MEASURED else text


def verdict(text: str) -> str:
    """A verdict without its reason and what other choices gave."""
    return text.partition(":")[0].partition(";")[0]


def first_number(text: str) -> float | str:
    """The first number of a text, which sorts it; empty if there is none."""
    for word in text.replace("+", " ").replace("x", " ").replace("%", " ").replace(";", " ").split():
        try:
            return float(word)
        except ValueError:
            continue
    return ""
