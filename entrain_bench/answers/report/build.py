"""The report on some runs: values of the answer and its evidence, and templates that show them as HTML and Markdown."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from entrain_bench.answers.answer import Answer, Pictures
from entrain_bench.answers.cases import Case
from entrain_bench.answers.commands import command_line, results_word, shared_overrides
from entrain_bench.answers.comparison import with_result
from entrain_bench.answers.decision import decide
from entrain_bench.answers.documents.claim import cited
from entrain_bench.answers.documents.claim_pages import decides
from entrain_bench.answers.fidelity import pair_rows, summary
from entrain_bench.answers.labels import cost_source
from entrain_bench.answers.report.read import NAMED, Material, setting_of
from entrain_bench.answers.sentences import losses, notices, posterior, problems, sentences
from entrain_bench.answers.statistics import kendall_tau, mean_interval
from entrain_bench.answers.text import escape_markdown, load_template
from entrain_bench.records.records import Record

TITLE = "Which balancing strategy to use"
# Sections in their order: anchor and title. Markdown folds all but the first ``OPEN``.
SECTIONS = {
    "decision": "Decision",
    "answer": "Every case",
    "ranking": "Ranking over workloads",
    "time": "Where the time goes",
    "robustness": "How firm that is",
    "settings": "Other settings",
    "failed": "Runs without a result",
    "claims": "Claims of the papers",
    "fidelity": "Fidelity",
    "environment": "Environment",
    "rerun": "How to run it again",
}
OPEN = 2
# Letters that an issue has room for, with some for the words of whoever writes it.
MAX_LETTERS = 60_000
# Templates leave them between parts of a section.
BLANK_LINES = re.compile(r"\n{3,}")
# Fewer strategies have no order to keep.
LEAST = 2

# A report, or the answer alone: plain values by section.
type Report = Mapping[str, Any]


def report_of(material: Material, pictures: Pictures | None = None) -> Report:
    """Return the report on runs of which at least one has a result; drawing pictures takes most of the time."""
    main = material.main
    others = material.others
    cases = [*main.cases, *others.cases]
    compared = others.about(others.contested, others.varying)
    settings = {"sentences": sentences(compared), "naming": compared.varying, "cases": _anchored(compared, cases)}
    return {
        **_core(main, material.results_dir, cases, pictures.standings(main) if pictures else None),
        "rerun": _anchored(material.answer.about(cases), cases, material.results_dir),
        "naming": NAMED,
        "notes": [*material.notes],
        "setting": setting_of(main.cases[0]),
        "shared": shared_overrides(main.records, [*main.cases[0].job, "strategy", "seed"]),
        "ranking": main.overall if min(len(main.cases), len(main.overall)) > 1 else {},
        "time": any(case.groups[key].seconds_by_part for case in main.cases for key in case.groups),
        "robustness": _robustness(main, others, cases),
        "settings": settings if compared.cases else None,
        "failed": problems(material.answer.results, material.answer.varying or ["strategy"]),
        "claims": None if material.claims is None else _claims(material.claims, material.results_dir),
        "fidelity": None if material.fidelity is None else _fidelity(material.fidelity, pictures),
        "environment": _environment(material),
    }


def answer_report(answer: Answer, results_dir: str, standings: bytes | None = None) -> Report:
    """Return the decision on some runs alone, with a table of every case and the commands; at least one case.

    ``standings`` is the picture of the answer.
    """
    cases = answer.cases
    rerun = _anchored(answer, cases, results_dir)
    return {**_core(answer, results_dir, cases, standings), "naming": answer.varying, "rerun": rerun}


def report_json(material: Material) -> str:
    """Return the sentences and numbers of the report as JSON."""
    main = material.main
    others = material.others
    values = {
        "entrain_bench": material.version,
        "sentences": sentences(main),
        "cases": main.case_dicts(material.results_dir),
        "other_settings": {"sentences": sentences(others), "cases": others.case_dicts(material.results_dir)},
        "notes": [*material.notes],
    }
    return json.dumps(values, indent=1) + "\n"


def html(report: Report) -> str:
    """Return one file: style and pictures inside, no scripts; every text is escaped."""
    sections = [(anchor, SECTIONS[anchor], body) for anchor, body in _bodies(report, "blocks.html")]
    return load_template("page.html").render(title=TITLE, sections=sections) + "\n"


def markdown(report: Report) -> str:
    """Return the same words for a GitHub issue: pictures are in the HTML only, sections after ``OPEN`` are folded.

    An issue has room for ``MAX_LETTERS``: sections that do not fit are left out, and named at the end.
    """
    text = f"# {escape_markdown(TITLE)}\n"
    left_out = []
    page = load_template("blocks.md.jinja").module
    for place, (anchor, body) in enumerate(_bodies(report, "blocks.md.jinja")):
        title = escape_markdown(SECTIONS[anchor])
        part = page.section(anchor, title, BLANK_LINES.sub("\n\n", f"{body.strip()}\n"), place >= OPEN)  # type: ignore[attr-defined]
        # Sections that are open answer; none of them is left out.
        if place < OPEN or len(text) + len(part) <= MAX_LETTERS:
            text += part
        else:
            left_out.append(title)
    return text + (f"\nTo keep this short, only report.html has: {', '.join(left_out)}.\n" if left_out else "")


def _bodies(report: Report, blocks: str) -> Iterator[tuple[str, str]]:
    """The sections that there are, in one of two forms."""
    sections = load_template("report.jinja").make_module({"r": report, "f": load_template(blocks).module})
    for anchor in SECTIONS:
        if report.get(anchor):
            yield anchor, str(getattr(sections, anchor)())


def _core(answer: Answer, results_dir: str, cases: Sequence[Case], standings: bytes | None) -> Report:
    words = {"posterior": posterior(answer), "losses": losses(answer.results)}
    return {
        "decision": {**answer.to_dict(), **decide(answer, results_dir), **words},
        "standings": b64encode(standings).decode() if standings else "",
        "answer": _anchored(answer, cases),
        "sentences": sentences(answer),
    }


def _anchored(answer: Answer, cases: Sequence[Case], results_dir: str | None = None) -> list[dict[str, Any]]:
    """The cases of an answer with the anchors of their commands, which count all cases of the report."""
    places = {id(case): f"runs-{number}" for number, case in enumerate(cases, start=1)}
    pairs = zip(answer.cases, answer.case_dicts(results_dir), strict=True)
    return [{"anchor": places[id(case)], **values} for case, values in pairs]


def _robustness(main: Answer, others: Answer, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """A row for each setting that has cases and strategies of the main one."""
    usual = {tuple(case.job[name] for name in NAMED): case for case in main.cases}
    settings: dict[str, list[tuple[Case, Case]]] = {}
    for case in others.cases:
        other = usual.get(tuple(case.job[name] for name in NAMED))
        if other and [*_taus(other, case)] and len(_shared(other, case)) >= LEAST:
            ours = setting_of(other)
            changed = (f"{key}={text}" for key, text in setting_of(case).items() if ours[key] != text)
            settings.setdefault(" ".join(changed), []).append((other, case))
    rows = []
    for setting, pairs in settings.items():
        stable = [other.best[0] in case.best for other, case in pairs if other.best]
        taus: dict[int, list[float]] = {}
        for seed, tau in (by_seed for pair in pairs for by_seed in _taus(*pair)):
            taus.setdefault(seed, []).append(tau)
        row = {
            "setting": setting,
            "anchor": f"runs-{1 + [id(case) for case in cases].index(id(pairs[0][1]))}",
            "num_cases": len(pairs),
            "sizes": sorted(len(_shared(*pair)) for pair in pairs),
            "num_stable": sum(stable),
            "num_decided": len(stable),
            "tau": mean_interval([sum(each) / len(each) for _, each in sorted(taus.items())]),
        }
        rows.append(row)
    return rows


def _shared(usual: Case, case: Case) -> list[tuple[str, ...]]:
    """The groups that two cases have."""
    return [key for key in usual.groups if key in case.groups]


def _taus(usual: Case, case: Case) -> Iterator[tuple[int, float]]:
    """Rank correlation of two cases' times at every seed that all shared groups ran in both; a lost run comes last."""
    names = _shared(usual, case)
    runs = [{*one.groups[key].runs} for one in (usual, case) for key in names]
    for seed in sorted(set.intersection(*runs)) if runs else ():
        orders = (
            [with_result(one.groups[key].times).get(seed, float("inf")) for key in names] for one in (usual, case)
        )
        yield seed, kendall_tau(*orders)


def _claims(claims: pd.DataFrame, results_dir: str) -> dict[str, Any]:
    """Counts of verdicts, claims that are no case of a matrix, and the command that measures them (``claims.csv``)."""
    counts = {}
    for title, name in (("as published", "published"), ("fair", "fair")):
        counts[title] = sorted(Counter(claims.loc[claims[name] != "", name]).items())
    rows = [
        {**row, "source": f"{cited(row['paper'])}, {row['where']}", "decides": decides(row)}
        for row in claims[claims["group"] == ""].to_dict("records")
    ]
    return {"counts": counts, "rows": rows, "command": command_line(["figures", "claims", *results_word(results_dir)])}


def _fidelity(rows: pd.DataFrame, pictures: Pictures | None) -> dict[str, Any]:
    """Predicted and measured times on real ranks (``fidelity.csv``)."""
    predictions = rows.groupby("prediction", sort=False)
    last = rows[rows["prediction"] == rows["prediction"].iloc[-1]]
    return {
        "rows": {str(name): summary(measured, pair_rows(measured)) for name, measured in predictions},
        "picture": b64encode(pictures.fidelity(last)).decode() if pictures else "",
    }


def _environment(material: Material) -> dict[str, Any]:
    """Versions and machines of the runs, and notices on their samples."""
    records = material.answer.records

    def values(value: Callable[[Record], str]) -> list[str]:
        return sorted({text for record in records if (text := value(record))})

    return {
        "num_runs": len(records),
        "num_ok": sum(record.status == "ok" for record in records),
        "backends": values(lambda record: str(record.labels["harness"])),
        "made": sorted(record.made_at for record in records if record.made_at),
        "hosts": values(lambda record: record.host),
        "costs": values(lambda record: f"{record.labels['cluster']} {cost_source(record.config['cluster'])}"),
        "version": material.version,
        "commits": values(lambda record: record.commit),
        "codes": values(lambda record: record.code_version),
        "libraries": values(lambda record: " ".join(map(" ".join, sorted(record.versions.items())))),
        "notices": notices(records),
    }
