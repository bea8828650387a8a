"""The page of claims: a summary, and one table with every claim, its verdicts and its commands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from entrain_bench.answers.documents.claim import Claim, load_claims
from entrain_bench.answers.documents.claim_pages import claim_commands, claim_row, value_text
from entrain_bench.answers.documents.claims import FINDINGS, read_claims
from entrain_bench.answers.documents.verdict import Finding, JudgedClaim, Verdict
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
    judged = read_claims(load_claims(), root / "results" / "reference" / FINDINGS)
    title, _, rest = committed.partition(FIRST_LIST)[0].partition("\n")
    papers = dict.fromkeys(f"{one.claim.system} <claims/{one.claim.file}>" for one in judged)
    parts = [
        "# Claims of the papers, checked",
        f"{title.removeprefix('# ')}.",
        "## Verdicts as published, by paper",
        _summary(judged),
        "## All claims",
        "Click a heading to sort. A claim's name leads to its settings, to other choices and to the assumption that "
        "decides. Copy a command to run both sides of a claim.",
        html_table("claims", COLUMNS, [*map(_row, judged)]),
        "## How verdicts are made",
        rest.strip(),
        "\n".join(["```{toctree}", ":hidden:", "", *papers, "```"]),
    ]
    return "\n\n".join(parts) + "\n"


def _summary(judged: Sequence[JudgedClaim]) -> str:
    counts: dict[str, Counter[Verdict]] = {}
    for one in judged:
        counts.setdefault(one.claim.system, Counter())[one.published.verdict] += 1
    shown = [verdict for verdict in Verdict if any(verdict in counter for counter in counts.values())]
    pages = {one.claim.system: one.claim.file for one in judged}
    lines = [
        [f"[{system}](claims/{pages[system]}.md)", *(str(count[name] or "") for name in shown), str(count.total())]
        for system, count in counts.items()
    ]
    return markdown(["paper", *shown, "all"], lines)


def _row(judged: JudgedClaim) -> Row:
    claim = judged.claim
    row = claim_row(judged)
    published = judged.published
    cells = (
        *(Cell(claim.system), Cell(claim.kind)),
        Cell(f"{claim.claim} ({claim.where})", link=f"claims/{claim.file}.html#{anchor(claim)}"),
        Cell(row["paper_value"], value=claim.value[0] if claim.value else ""),
        Cell(value_text(claim, published), value=_number(published)),
        _verdict(published, row["published_verdict"], strong=published.verdict == Verdict.REPRODUCED),
        Cell(row["fair_value"], value=_number(judged.fair)),
        _verdict(judged.fair, row["fair_verdict"]),
    )
    return Row(claim.name, cells, [command for command, label in claim_commands(claim).items() if label in SETTINGS])


def _number(finding: Finding | None) -> float | str:
    return finding.number if finding and finding.number is not None else ""


def _verdict(finding: Finding | None, text: str, strong: bool = False) -> Cell:
    """A verdict with what other choices gave, sorted by itself; of a claim without runs no reason."""
    plain = str(finding.verdict) if finding else ""
    return Cell(plain if plain == Verdict.NOT_MEASURED else text, value=plain, strong=strong)


def anchor(claim: Claim) -> str:
    """The heading of a claim, or of its group, on its paper's page, as docutils spells it."""
    return (claim.group or claim.name).replace("_", "-").lower()
