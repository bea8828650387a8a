"""The report on a folder of runs: the answer with its evidence, as Markdown, and as HTML that is made from it."""

import json
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import Any

from entrain_bench.answers.answer import Answer
from entrain_bench.answers.labels import cost_source
from entrain_bench.answers.sentences import notices, problems, sentences
from entrain_bench.answers.text import count, load_template, to_html
from entrain_bench.base.errors import UserError, no_runs
from entrain_bench.records.code import code_version
from entrain_bench.records.keys import targets_of
from entrain_bench.records.records import Record, Results, lost_runs

TITLE = "Recommended balancing strategy"
# Sections in their order: anchor and title. Markdown folds those after the first ``OPEN``.
SECTIONS = {
    "decision": "Decision",
    "answer": "Every case",
    "failed": "Runs without a result",
    "environment": "Environment",
    "rerun": "How to run it again",
}
OPEN = 2
# Headings of a case's job that are always shown.
NAMED = ("workload", "model")

# Plain values; a section whose value is empty is left out.
type Report = Mapping[str, Any]


def read_answer(results: Results) -> tuple[Answer, list[str]]:
    """Return the answer of a folder, and notes on runs that it leaves out; ``UserError`` if none has a result."""
    records, notes = current_records(results.records())
    if not any(record.status == "ok" for record in records):
        raise no_runs(results.root)
    return Answer.of(records, lost_runs(results, {record.key for record in records})), notes


def current_records(records: Sequence[Record]) -> tuple[list[Record], list[str]]:
    """Return the records that may be compared, and a note on the others.

    Records of the code that would run now count; if there are none, of every configuration the newest. The code of a
    user's strategy is that of the folder that its record names; it is read, not imported.
    """

    def is_current(record: Record) -> bool:
        with suppress(UserError):
            return record.code_version == code_version(frozenset(targets_of(record.config)), record.config_dir)
        return False

    current = [record for record in records if is_current(record)]
    if not current:
        by_age = sorted(records, key=lambda record: record.made_at)
        newest = {repr([*sorted(one.labels.items()), *sorted(one.config.items())]): one.key for one in by_age}
        current = [record for record in records if record.key in newest.values()]
        notes = [f"All {count(len(current), 'run')} are of other code; the same commands run them again."]
        return current, notes if records else []
    older = len(records) - len(current)
    return current, [
        f"Left out: {count(older, 'run')} of other code; the same commands run them again."
    ] if older else []


def report_of(answer: Answer, results_dir: str, notes: Sequence[str] = (), standings: bytes | None = None) -> Report:
    """Return the report on the runs of at least one case; ``standings``: a picture of them (PNG)."""
    job = answer.cases[0].job
    naming = [heading for heading in job if heading in NAMED or heading in answer.varying]
    return {
        "decision": {**answer.to_dict(), **answer.decision(results_dir)},
        "standings": b64encode(standings).decode() if standings else "",
        "sentences": sentences(answer),
        "notes": [*notes],
        "naming": naming,
        "cases": answer.case_dicts(results_dir),
        "setting": {heading: text for heading, text in job.items() if heading not in naming},
        "failed": problems(answer),
        "environment": _environment(answer.records),
        "version": version("entrain-bench"),
    }


def report_json(answer: Answer, results_dir: str, notes: Sequence[str] = ()) -> str:
    """Return the sentences and numbers of the report as JSON."""
    values = {
        "entrain_bench": version("entrain-bench"),
        "sentences": sentences(answer),
        "cases": answer.case_dicts(results_dir),
        "notes": [*notes],
    }
    return json.dumps(values, indent=1) + "\n"


def html(report: Report) -> str:
    """Return one file: style and pictures inside, no scripts; the Markdown's texts are escaped."""
    body = to_html("".join(_sections(report, is_page=True)))
    shown = {anchor: title for anchor, title in SECTIONS.items() if report.get(anchor, True)}
    return load_template("page.html").render(title=TITLE, sections=shown, body=body) + "\n"


def markdown(report: Report) -> str:
    """Return the same words for a GitHub issue: pictures are in the HTML only, sections after ``OPEN`` are folded."""
    return f"# {TITLE}\n" + "".join(_sections(report, is_page=False))


def _sections(report: Report, is_page: bool) -> Iterator[str]:
    template: Any = load_template("report.jinja").make_module({"r": report, "is_page": is_page})
    for place, (anchor, title) in enumerate(SECTIONS.items()):
        if report.get(anchor, True):
            body = getattr(template, anchor)().strip("\n")
            yield str(template.section(anchor, title, body, place >= OPEN and not is_page))


def _environment(records: Sequence[Record]) -> dict[str, Any]:
    def values(value: Callable[[Record], str]) -> list[str]:
        return sorted({text for record in records if (text := value(record))})

    return {
        "num_runs": len(records),
        "num_ok": sum(record.status == "ok" for record in records),
        "backends": values(lambda record: str(record.labels["harness"])),
        "made": values(lambda record: record.made_at),
        "hosts": values(lambda record: record.host),
        "costs": values(lambda record: f"{record.labels['cluster']} {cost_source(record.config['cluster'])}"),
        "commits": values(lambda record: record.commit),
        "codes": values(lambda record: record.code_version),
        "libraries": values(lambda record: " ".join(map(" ".join, sorted(record.versions.items())))),
        "notices": [f"Samples, {notice}." for notice in notices(records)],
    }
