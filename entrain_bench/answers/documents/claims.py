"""Judged claims as files and texts: findings, the page with all verdicts, and a page per paper.

``claims.json`` holds the findings; the other files are written from them and read by people only.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from entrain_bench.answers.commands import sweep_command
from entrain_bench.answers.documents.claim import FAIR, JUDGED, OTHERWISE, PUBLISHED, Claim, Kind, cited, load_claims
from entrain_bench.answers.documents.tables import WAY_UP
from entrain_bench.answers.documents.verdict import Finding, JudgedClaim, Verdict, judge_claim
from entrain_bench.answers.text import NOTHING, count, load_template, markdown_table, slug
from entrain_bench.base.files import write_atomically
from entrain_bench.run.study import Output, Study

TEMPLATES = Path(__file__).parents[1] / "templates"
FINDINGS = "claims.json"
INDEX = "claims.md"
# For pages that show no claim: the number of speedups that hold under equal tuning, and promises of abstracts.
HOLDING = "tables/claims_hold.md"
HEADLINES = "tables/headline_claims.md"
# Papers that this suite began with; the table of headlines on other pages has theirs.
FIRST = ("entrain", "disttrain", "dflop", "hetero")
VERDICTS = ("paper_value", "published_value", "published_verdict", "fair_value", "fair_verdict")
HEADINGS = ["paper", "as published", "verdict", "equal tuning", "verdict, equal tuning"]
KINDS = {"gains, orders": (Kind.GAIN, Kind.ORDER), "levels, limits": (Kind.LEVEL, Kind.LIMIT)}
SETTINGS = (PUBLISHED, FAIR)
# Verdicts of the table of counts; all others are counted together.
SHOWN = (Verdict.REPRODUCED, Verdict.EXCEEDS, Verdict.PARTLY, Verdict.NOT_REPRODUCED)
# Verdicts of claims that hold.
HOLD = (Verdict.REPRODUCED, Verdict.EXCEEDS)


def claims_output() -> Output:
    """The document of all claims."""
    claims = load_claims()
    pages = dict.fromkeys(f"claims/{claim.file}.md" for claim in claims)
    numbers = [cell.printed for claim in claims for cell in (*claim.cells, *claim.per)]
    return Output(
        "claims",
        [*dict.fromkeys(sweep for claim in claims for sweep in claim.sweeps)],
        lambda study: write_claims(claims, study),
        [FINDINGS, INDEX, *pages],
        files=[HOLDING, HEADLINES],
        details=[*numbers, *(path.read_text() for path in sorted(TEMPLATES.glob("claims*")))],
    )


def write_claims(claims: Sequence[Claim], study: Study) -> str:
    """Write findings, pages and tables of other pages; returns missing measurements, if any."""
    judged = [judge_claim(claim, study) for claim in claims]
    findings = ",\n".join(json.dumps(one.to_dict()) for one in judged)
    files = {FINDINGS: f"[\n{findings}\n]\n", **claims_pages(judged)}
    for name, text in files.items():
        write_atomically(study.results.root / name, text.encode())
    return "; ".join(
        f"{one.claim.name} ({name}): {finding.verdict}: {finding.reason}"
        for one in judged
        for name, finding in one.findings.items()
        if name in JUDGED and finding.verdict == Verdict.NOT_MEASURED
    )


def read_claims(claims: Sequence[Claim], path: Path) -> list[JudgedClaim]:
    """Each claim with its findings in ``claims.json``; a claim that it lacks, or has of other runs, is not measured."""
    entries = json.loads(path.read_text()) if path.exists() else []
    known = {(entry["name"], entry["runs"]): entry for entry in entries}
    unknown = Finding(verdict=Verdict.NOT_MEASURED, reason="run make claims")
    return [
        JudgedClaim.from_dict(claim, entry)
        if (entry := known.get((claim.name, claim.hash_of_runs)))
        else JudgedClaim(claim, dict.fromkeys(claim.settings, unknown))
        for claim in claims
    ]


def claims_pages(judged: Sequence[JudgedClaim]) -> dict[str, str]:
    """``claims.md``, a page for every paper, and tables of other pages, by path in the folder of results."""
    groups = _by_file(judged)
    first = sorted((one for one in judged if one.claim.file in FIRST), key=lambda one: FIRST.index(one.claim.file))
    index = {
        "holding": holding_sentence(judged),
        "counts": counts_table(judged),
        "agreement": agreement(judged),
        "papers": [_paper(file, members, "claims/") for file, members in groups],
    }
    page = load_template("claims_of_paper.md.j2")
    return {
        INDEX: load_template("claims.md.j2").render(index),
        HOLDING: f"{holding_sentence(judged)}\n",
        HEADLINES: headline_table(first, f"{WAY_UP}docs/claims/"),
        **{f"claims/{file}.md": page.render(_paper(file, members)) for file, members in groups},
    }


def _by_file(judged: Iterable[JudgedClaim]) -> list[tuple[str, list[JudgedClaim]]]:
    return [(file, [*members]) for file, members in groupby(judged, key=lambda one: one.claim.file)]


def _paper(file: str, judged: Sequence[JudgedClaim], folder: str = "") -> dict[str, Any]:
    """Values of a paper's page, or of its section on the first page, from which ``folder`` leads to the paper's.

    Claims of one group share a row and a section. Comparisons of speed come first.
    """
    groups: dict[str, list[JudgedClaim]] = {}
    for one in judged:
        groups.setdefault(one.claim.group or one.claim.name, []).append(one)
    ordered = sorted(groups.values(), key=lambda some: not any(FAIR in one.findings for one in some))
    page = f"{folder}{file}.md"
    return {
        "file": file,
        "system": judged[0].claim.system,
        "counts": counts(judged),
        "headlines": headline_table(judged, folder),
        "table": markdown_table(["claim", "where", *HEADINGS], [_summary(page, some) for some in ordered]),
        "sections": [_section(members) for members in ordered],
    }


def headline_table(judged: Sequence[JudgedClaim], folder: str) -> str:
    """Return a table of abstracts' promises and their outcomes; ``folder`` leads to the pages of the papers."""
    rows = []
    for one in judged:
        claim = one.claim
        if claim.headline:
            link = f"[{claim.system}]({folder}{claim.file}.md#{slug(claim.heading)}): {claim.headline}"
            rows.append(
                [link, claim.format(claim.value), *(_outcome(claim, one.findings.get(name)) for name in SETTINGS)]
            )
    return markdown_table(["claim", "paper", "here, the paper's layouts", "here, equal tuning"], rows) if rows else ""


def _outcome(claim: Claim, finding: Finding | None) -> str:
    """The number and the verdict in a few words."""
    if finding is None:
        return "not a speedup"
    number = "" if finding.number is None else f"{claim.format([finding.number])}, "
    return f"{number}{finding.verdict}"


def _summary(page: str, members: Sequence[JudgedClaim]) -> list[str]:
    """The row of a claim in the list of all claims; one row for all claims of a group."""
    claim = members[0].claim
    if not claim.group:
        link = f"[{claim.claim}]({page}#{slug(claim.heading)})"
        row = claim_row(members[0]) | {"published_value": value_text(claim, members[0].findings[PUBLISHED])}
        return [link, claim.where, *(row[name] for name in VERDICTS)]
    values = [value for one in members for value in one.claim.value]
    places = dict.fromkeys(cell.where.partition(",")[0] for one in members for cell in one.claim.cells)
    link = f"[{claim.title} ({len(members)} cells)]({page}#{slug(claim.title)})"
    paper = claim.format((min(values), max(values)) if values else ())
    return [link, "; ".join(places), paper, "", tally(members, PUBLISHED), "", tally(members, FAIR)]


def _section(members: Sequence[JudgedClaim]) -> dict[str, Any]:
    first = members[0]
    claim = first.claim
    rows = [
        [one.claim.name, " ".join(cell.id for cell in one.claim.cells), *(claim_row(one)[name] for name in VERDICTS)]
        for one in members
    ]
    if claim.group:
        fair = tally(members, FAIR)
        published = f"{len(members)} cases, as published: {tally(members, PUBLISHED)}"
        outcome = published + (f"; equal tuning: {fair}" if fair else "")
    else:
        fair = f"; equal tuning: {_outcome(claim, first.findings[FAIR])}" if FAIR in first.findings else ""
        published = _outcome(claim, first.findings[PUBLISHED])
        stated = f"{claim.claim}. " if claim.title else ""
        outcome = f"{stated}Paper: {claim.format(claim.value)}; here, as published: {published}{fair}"
    return {
        "name": claim.group or claim.name,
        "heading": claim.heading,
        "outcome": outcome,
        "table": markdown_table(["case", "cells", *HEADINGS], rows) if claim.group else "",
        "details": claim_details(first),
        "commands": claim_commands(claim),
    }


def claim_row(judged: JudgedClaim) -> dict[str, str]:
    """A claim's numbers and verdicts as texts."""
    claim = judged.claim
    row = {"paper_value": claim.format(claim.value)}
    for name in JUDGED:
        row[f"{name}_value"] = value_text(claim, judged.findings.get(name))
        row[f"{name}_verdict"] = verdict_text(judged.findings.get(name))
    choices = {label: finding for label, finding in judged.findings.items() if label not in JUDGED}
    verdicts = {verdict_text(one): None for one in choices.values() if one.number is not None}
    verdicts.pop(row["published_verdict"], None)
    row["published_verdict"] += f"; under other choices {' or '.join(verdicts)}" if verdicts else ""
    row["published_value"] += _range(claim, [*choices.values()])
    row["other_choices"] = "; ".join(f"{label}: {_in_words(claim, one)}" for label, one in choices.items())
    row["assumption"] = f"{claim.assumption}; otherwise, {claim.opposite}" if claim.assumption else ""
    return row


def value_text(claim: Claim, finding: Finding | None) -> str:
    """The number and its interval; of an order with several cases their ends, and in how many it holds; runs lost."""
    if finding is None or finding.number is None:
        return ""
    ends = [end for end in (finding.low, finding.high) if end is not None]
    if finding.num_cases > 1:
        unclear = f", {finding.num_unclear} unclear" if finding.num_unclear else ""
        text = f"{claim.format(ends)} ({finding.num_held} of {finding.num_cases}{unclear})"
    else:
        text = claim.format([finding.number]) + (f" ({claim.format(ends)})" if ends else "")
    if finding.num_lost:
        seeds = ", ".join(map(str, finding.lost_seeds))
        text += f"; {finding.num_lost} of {finding.num_runs} runs have no result (seeds left out: {seeds})"
    return text


def verdict_text(finding: Finding | None) -> str:
    """The verdict, with missing parts of its setting."""
    if finding is None:
        return ""
    reason = finding.reason
    if finding.need_bytes is not None and finding.has_bytes is not None:
        reason = f"needs {finding.need_bytes / 2**30:.0f} of {finding.has_bytes / 2**30:.0f} GiB"
    return f"{finding.verdict}: {reason}" if reason else str(finding.verdict)


def _in_words(claim: Claim, finding: Finding | None) -> str:
    return f"{value_text(claim, finding) or 'nothing'} ({verdict_text(finding)})"


def _range(claim: Claim, choices: Sequence[Finding]) -> str:
    """The range of the numbers under other choices, and how many of these have none."""
    if not choices:
        return ""
    numbers = [one.number for one in choices if one.number is not None]
    ends = claim.format([*{min(numbers): 0, max(numbers): 0}]) if numbers else "nothing"
    lacking = len(choices) - len(numbers)
    return f"; {ends} under other choices" + (f" ({lacking} of {len(choices)} without result)" if lacking else "")


def claim_details(judged: JudgedClaim) -> dict[str, str]:
    """The details of a claim, by label."""
    claim = judged.claim
    findings = judged.findings
    row = claim_row(judged)
    differs = "".join(f" Here otherwise: {text}." for text in claim.differs.values())
    published = f"{row['published_value'] or 'nothing'} ({row['published_verdict']})"
    details = {
        "Claim": f"{claim.claim}: {row['paper_value']} ({cited(claim.paper)}, {claim.where})",
        "Paper": claim.paper_setting + differs,
        "As published": f"{published}. {claim.published.words}",
        "Other choices": f"{row['other_choices']}." if row["other_choices"] else "",
        "Equal tuning": f"{_in_words(claim, findings[FAIR])}. {claim.settings[FAIR].words}" if FAIR in findings else "",
        "Deciding assumption": f"{row['assumption']}: {_in_words(claim, findings[OTHERWISE])}."
        if claim.assumption
        else "",
        "Why": claim.why,
    }
    return {label: text for label, text in details.items() if text}


def claim_commands(claim: Claim) -> dict[str, str]:
    """The command of every sweep, once, with the setting that it is of first."""
    words = {PUBLISHED: "as published", FAIR: "equal tuning", OTHERWISE: f"otherwise: {claim.opposite}"}
    commands: dict[str, str] = {}
    for label, setting in claim.settings.items():
        for sweep in setting.sweeps:
            commands.setdefault(sweep_command(sweep), words.get(label, f"other choice: {label}"))
    return commands


def claim_text(judged: JudgedClaim) -> str:
    """One claim's details and commands for a terminal."""
    details = [f"  {label}: {text}" for label, text in claim_details(judged).items()]
    commands = [f"# {label}\n{command}" for command, label in claim_commands(judged.claim).items()]
    return "\n".join([judged.claim.name, *details, "", *commands])


def claims_text(judged: Sequence[JudgedClaim]) -> str:
    """For every paper a line per claim with its verdicts, then all counts, for a terminal."""
    lines = []
    width = max(len(one.claim.name) for one in judged)
    for _, members in _by_file(judged):
        lines.append(f"{members[0].claim.system}, {counts(members)}")
        for one in members:
            row = claim_row(one)
            fair = f" | equal tuning {row['fair_value']} {row['fair_verdict']}" if FAIR in one.findings else ""
            published = f"{value_text(one.claim, one.findings[PUBLISHED])} {row['published_verdict']}"
            lines.append(f"  {one.claim.name:{width}}  {row['paper_value']}: {published}{fair}")
        lines.append("")
    return "\n".join([*lines, counts(judged), agreement(judged)])


def agreement(judged: Sequence[JudgedClaim]) -> str:
    """How many claims agree with how many cells; claims that contradict their cells are not loaded."""
    cells = {cell.id for one in judged for cell in (*one.claim.cells, *one.claim.per)}
    with_cells = sum(bool(one.claim.cells) for one in judged)
    return f"0 mismatches between {with_cells} claims and {len(cells)} published cells"


def counts(judged: Sequence[JudgedClaim]) -> str:
    """How many claims there are, and how many have each verdict as published and fair."""
    fair = tally(judged, FAIR)
    text = f"{count(len(judged), 'claim')}: as published {tally(judged, 'published')}"
    return text + (f"; under equal tuning {fair}" if fair else "")


def tally(judged: Iterable[JudgedClaim], name: str) -> str:
    """How many claims have each verdict in a setting; those without the setting do not count."""
    number = _verdicts(judged, name)
    return ", ".join(f"{number[verdict]} {verdict}" for verdict in Verdict if number[verdict])


def counts_table(judged: Sequence[JudgedClaim]) -> str:
    """How many claims of each paper and kind have each verdict, and how many hold under equal tuning."""
    groups = {f"[{members[0].claim.system}](claims/{file}.md)": members for file, members in _by_file(judged)}
    kinds = {title: [one for one in judged if one.claim.kind in some] for title, some in KINDS.items()}
    rows = []
    for title, members in {**groups, **kinds, "all": judged}.items():
        published, fair = (_verdicts(members, name) for name in SETTINGS)
        held = f"{_held(fair)} of {fair.total()}" if fair else NOTHING
        shown = [published[verdict] for verdict in SHOWN]
        rows.append([title, *map(str, (len(members), *shown, len(members) - sum(shown))), held])
    heading = ["claims of", "number", *SHOWN, "other", "hold under equal tuning"]
    return markdown_table(heading, rows, heading[1:])


def holding_sentence(judged: Sequence[JudgedClaim]) -> str:
    """How many speedups hold under equal tuning."""
    number = _verdicts(judged, FAIR)
    held, undecided, total = _held(number), number[Verdict.UNDECIDED], number.total()
    failed = total - held - undecided
    return f"Under equal tuning, of {total} published speedups {held} hold, {failed} do not, {undecided} are undecided."


def _held(number: Counter[Verdict]) -> int:
    return sum(number[verdict] for verdict in HOLD)


def _verdicts(judged: Iterable[JudgedClaim], name: str) -> Counter[Verdict]:
    return Counter(finding.verdict for one in judged if (finding := one.findings.get(name)))
