"""The report on a folder of runs: the answer with its evidence, shown as HTML and Markdown by the same templates."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from entrain_bench.answers.answer import Answer, Pictures
from entrain_bench.answers.cases import Case
from entrain_bench.answers.commands import shared_overrides
from entrain_bench.answers.labels import cost_source
from entrain_bench.answers.sentences import losses, notices, posterior, problems, sentences
from entrain_bench.answers.text import count, escape_markdown, listing, load_template
from entrain_bench.base.errors import UserError
from entrain_bench.records.code import code_version
from entrain_bench.records.keys import targets_of
from entrain_bench.records.records import Record, Results
from entrain_bench.records.sweeps import lost_runs

TITLE = "Which balancing strategy to use"
# Sections in their order: anchor and title. Markdown folds all but the first ``OPEN``.
SECTIONS = {
    "decision": "Decision",
    "answer": "Every case",
    "ranking": "Ranking over workloads",
    "settings": "Other settings",
    "failed": "Runs without a result",
    "environment": "Environment",
    "rerun": "How to run it again",
}
OPEN = 2
# Letters that an issue has room for, with some for the words of whoever writes it.
MAX_LETTERS = 60_000
# Templates leave them between parts of a section.
BLANK_LINES = re.compile(r"\n{3,}")
# Headings of a case's job that are not its setting.
NAMED = ("workload", "model")

# Plain values by section.
type Report = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Material:
    """Runs of a report; ``notes`` tell which are left out, or are not known to be of today's code."""

    answer: Answer
    version: str
    results_dir: str
    notes: Sequence[str] = ()

    @property
    def main(self) -> Answer:
        """The answer in the setting with the most strategies to compare, counted in every case.

        Of equals, the one that leaves the most keys free; then that of the most runs, then of the fewest overrides.
        """
        settings: dict[tuple[str, ...], list[Case]] = {}
        for case in self.answer.cases:
            settings.setdefault(tuple(setting_of(case).values()), []).append(case)

        def place(setting: tuple[str, ...]) -> tuple[int, int, int, int, tuple[str, ...]]:
            cases = settings[setting]
            compared = sum(len({result.strategy for result in case.results}) for case in cases if case.contested)
            overrides = min(len(record.overrides) for case in cases for record in case.records)
            num_runs = sum(len(case.records) for case in cases)
            return -compared, -max(case.freedom for case in cases), -num_runs, overrides, setting

        return self.answer.about(settings[min(settings, key=place)])

    @property
    def others(self) -> Answer:
        """The answer in all other settings."""
        main = {id(case) for case in self.main.cases}
        others = [case for case in self.answer.cases if id(case) not in main]
        return self.answer.about(others, self.answer.varying)


def setting_of(case: Case) -> Mapping[str, str]:
    """Return a case's job without workload and model."""
    return {heading: text for heading, text in case.job.items() if heading not in NAMED}


def read_material(results: Results) -> Material:
    """Read the runs of a folder; ``UserError`` if none has a result."""
    records, notes = current_records(results.records())
    if not any(record.status == "ok" for record in records):
        hint = "must hold a run with a result; entrain-bench --help shows how to run"
        raise UserError(f"results_dir={results.root}: {hint}")
    lost = lost_runs(results, {record.key for record in records})
    return Material(Answer.of(records, lost), version("entrain-bench"), str(results.root), notes)


def current_records(records: Sequence[Record]) -> tuple[list[Record], list[str]]:
    """Return the records that may be compared, and notes on the others.

    Records of the code that would run now count; if there are none, all others do, of one configuration the newest.
    The code of a user's strategy is that of the folder that its record names; it is read, not imported.
    """
    folders = sorted({record.config_dir for record in records if record.config_dir})
    missing = [folder for folder in folders if not Path(folder).is_dir()]
    unknown = {record.key for record in records if record.config_dir in missing}

    def is_current(record: Record) -> bool:
        with suppress(UserError):
            return record.code_version == code_version(frozenset(targets_of(record.config)), record.config_dir)
        return False

    current = [record for record in records if record.key in unknown or is_current(record)]
    notes = []
    if unknown:
        notes.append(
            f"{count(len(unknown), 'run')} of folders that are not there ({listing(missing)}): whether today's code "
            "would give the same is not known."
        )
    if current:
        if older := len(records) - len(current):
            notes.append(f"Left out: {count(older, 'run')} of older code; the same commands run them again.")
        return current, notes
    by_age = sorted(records, key=lambda record: record.made_at)
    newest = {repr([*sorted(one.labels.items()), *sorted(one.config.items())]): one.key for one in by_age}
    if records:
        notes.append(f"All {count(len(newest), 'run')} are of older code; the same commands run them again.")
    if replaced := len(records) - len(newest):
        notes.append(f"Left out: {count(replaced, 'run')} that newer code ran again.")
    return [record for record in records if record.key in newest.values()], notes


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
        "settings": settings if compared.cases else None,
        "failed": problems(material.answer),
        "environment": _environment(material),
    }


def answer_report(answer: Answer, results_dir: str, standings: bytes | None = None) -> Report:
    """Return the decision on the runs of at least one case, a table of the cases and commands; with a picture."""
    rerun = _anchored(answer, answer.cases, results_dir)
    return {**_core(answer, results_dir, answer.cases, standings), "naming": answer.varying, "rerun": rerun}


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
    sections = load_template("report.jinja").make_module({"r": report, "f": load_template(blocks).module})
    for anchor in SECTIONS:
        if report.get(anchor):
            yield anchor, str(getattr(sections, anchor)())


def _core(answer: Answer, results_dir: str, cases: Sequence[Case], standings: bytes | None) -> Report:
    words = {"posterior": posterior(answer), "losses": losses(answer)}
    return {
        "decision": {**answer.to_dict(), **answer.decision(results_dir), **words},
        "standings": b64encode(standings).decode() if standings else "",
        "answer": _anchored(answer, cases),
        "sentences": sentences(answer),
    }


def _anchored(answer: Answer, cases: Sequence[Case], results_dir: str | None = None) -> list[dict[str, Any]]:
    """Return the cases of an answer with the anchors of their commands, which count all cases of the report."""
    places = {id(case): f"runs-{number}" for number, case in enumerate(cases, start=1)}
    pairs = zip(answer.cases, answer.case_dicts(results_dir), strict=True)
    return [{"anchor": places[id(case)], **values} for case, values in pairs]


def _environment(material: Material) -> dict[str, Any]:
    records = material.answer.records

    def values(value: Callable[[Record], str]) -> list[str]:
        return sorted({text for record in records if (text := value(record))})

    return {
        "num_runs": len(records),
        "num_ok": sum(record.status == "ok" for record in records),
        "backends": values(lambda record: str(record.labels["harness"])),
        "made": values(lambda record: record.made_at),
        "hosts": values(lambda record: record.host),
        "costs": values(lambda record: f"{record.labels['cluster']} {cost_source(record.config['cluster'])}"),
        "version": material.version,
        "commits": values(lambda record: record.commit),
        "codes": values(lambda record: record.code_version),
        "libraries": values(lambda record: " ".join(map(" ".join, sorted(record.versions.items())))),
        "notices": notices(records),
    }
