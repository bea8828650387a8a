"""Read a results folder for a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pandas as pd

from entrain_bench.answers.answer import Answer
from entrain_bench.answers.cases import Case
from entrain_bench.answers.compare import read_text
from entrain_bench.answers.text import count, listing
from entrain_bench.base.errors import UserError
from entrain_bench.records.code import code_version
from entrain_bench.records.keys import targets_of
from entrain_bench.records.records import Record, Results
from entrain_bench.records.sealed import log_warning
from entrain_bench.records.sweeps import lost_runs
from entrain_bench.run.stamps import Stamp, read_stamp

HAS_NONE = "must hold a run with a result; entrain-bench --help shows how to run"
# Headings of a case's job that are not its setting.
NAMED = ("workload", "model")


@dataclass(frozen=True, slots=True)
class Material:
    """Content of a report.

    Attributes:
        notes: sentences on runs that are left out, or that are not known to be of today's code.
        claims: the rows of ``claims.csv``; None where there are none.
        fidelity: the rows of ``fidelity.csv``; None where there are none.
    """

    answer: Answer
    version: str
    results_dir: str
    notes: Sequence[str] = ()
    claims: pd.DataFrame | None = None
    fidelity: pd.DataFrame | None = None

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
            compared = sum(len({group.strategy for group in case.groups.values()}) for case in cases if case.contested)
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
    """Everything that the page is made of.

    Raises:
        UserError: if no run has a result.
    """
    records, notes = current_records(results.records())
    if not any(record.status == "ok" for record in records):
        raise UserError(f"results_dir={results.root}: {HAS_NONE}")
    lost = lost_runs(results, {record.key for record in records})
    return Material(
        Answer.of(records, lost),
        version("entrain-bench"),
        str(results.root),
        notes,
        read_csv(results, "claims", text=True),
        read_csv(results, "fidelity"),
    )


def current_records(records: Sequence[Record]) -> tuple[list[Record], list[str]]:
    """Those of some records that may be compared, and what is said of the others.

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
    newest = {
        repr(sorted(record.labels.items())) + repr(sorted(record.config.items())): record
        for record in sorted(records, key=lambda record: record.made_at)
    }
    if records:
        notes.append(f"All {count(len(newest), 'run')} are of older code; the same commands run them again.")
    if replaced := len(records) - len(newest):
        notes.append(f"Left out: {count(replaced, 'run')} that newer code ran again.")
    kept = {record.key for record in newest.values()}
    return [record for record in records if record.key in kept], notes


def read_csv(results: Results, name: str, text: bool = False) -> pd.DataFrame | None:
    """A table; None if there is none, or if it is not as it was written, which a warning says."""
    path = results.root / f"{name}.csv"
    if not path.exists():
        return None
    stamp = read_stamp(results, name)
    try:
        if stamp and stamp.files.get(path.name) != Stamp.of("", [path.name], results.root).files[path.name]:
            raise ValueError("it was edited since")
        return read_text(path.read_text()) if text else pd.read_csv(path)
    except ValueError as error:
        log_warning(path, f"not shown ({' '.join(str(error).split())}); make it again")
        return None
