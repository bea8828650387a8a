"""``entrain-bench verify [KEY=VALUE ...]``: recompute the committed results, or verify a folder (docs/verify.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from entrain_bench.answers.text import count
from entrain_bench.base.errors import UserError, require
from entrain_bench.commands.outputs import make, reference_outputs
from entrain_bench.commands.reference import Committed, changes
from entrain_bench.config.compose import Composer
from entrain_bench.config.grammar import Request, Verb, own
from entrain_bench.records.cells import Cell
from entrain_bench.records.code import current_commit, versions
from entrain_bench.records.records import MEASURED, Record, Results, read_sweeps, sorted_records
from entrain_bench.records.sealed import CachedLayouts
from entrain_bench.records.tables import table_csv
from entrain_bench.run.cells import is_simulated, run_cells
from entrain_bench.run.parallel import num_processes
from entrain_bench.run.study import Study

EXIT_FAILED = 1
# Letters of a commit that the verdict shows.
COMMIT_LETTERS = 12


@dataclass(frozen=True, slots=True)
class Keys(Committed):
    """Own keys."""

    results_dir: str = own("", "folder of results to verify (default: the committed reference)")
    sample: int = own(20, "number of random runs to simulate again")
    seed: int = own(0, "random seed that selects these runs")

    def __post_init__(self) -> None:
        """Check ranges."""
        require(self.sample >= 0, "sample", self.sample, "at least 0")
        require(self.seed >= 0, "seed", self.seed, "at least 0")


VERB = Verb(Keys, examples=["results_dir=results sample=20 seed=0"])


def main(request: Request[Keys]) -> int:
    """Compare with the reference, or verify a folder; ``UserError`` for missing folders.

    Returns 0 if all values are as committed, or as the folder says, to the last digit, else 1.
    """
    keys = request.keys
    if not keys.results_dir:
        require(request.config_dir is None, "--config-dir", request.config_dir, "given with results_dir, or left out")
        keys.check()
        wanted = reference_outputs()
        with TemporaryDirectory(prefix="entrain-bench-") as folder:
            study = Study(Results(Path(folder)))
            complete = make(wanted, study, mlflow=False)
            drifted = changes(keys, wanted, study)
        for line in drifted:
            print(line)
        lacking = "" if complete else "; some cells have no result"
        print(f"{len(drifted)} drifts from {Path(keys.reference_dir)}{lacking}")
        return EXIT_FAILED if drifted or not complete else 0
    verification = Verification(Path(keys.results_dir), request.config_dir or "")
    verification.read_all()
    verification.recompute(keys.sample, keys.seed, num_processes())
    for line in (*verification.problems, *verification.verdict(keys.seed)):
        print(line)
    return 0 if verification.right else EXIT_FAILED


class Verification:
    """Findings on a folder of results (``root``); ``problems`` has a line for each thing that is wrong.

    ``config_dir`` is the folder of the user's whose code may run for runs that name one; empty for none.
    """

    def __init__(self, root: Path, config_dir: str) -> None:
        self.problems: list[str] = []
        self._results = Results(root, self._name)
        self._config_dir = config_dir
        self._counts: Counter[str] = Counter()
        keys = self._results.keys()
        if not keys:
            raise UserError(f"results_dir={root}: contains no runs. Name a folder that a sweep has written")
        self._counts["files"] = len(keys)
        self._records = {key: record for key in keys if (record := self._results.read(key))}
        # Cells that today's code makes under the keys of records, and records of other code.
        self._cells: dict[str, Cell] = {}
        self._others: list[Record] = []

    def _name(self, path: Path, problem: str) -> None:
        self.problems.append(f"{path}: {problem}")

    def read_all(self) -> None:
        """Let every file of the folder prove itself."""
        results = self._results
        for record in self._records.values():
            known = len(self.problems)
            if not results.has_timeline(record) and record.timeline and len(self.problems) == known:
                self._name(results.timeline_path(record.key), "absent, though its run kept it")
        for path in sorted((results.root / "plans").glob("*.json")):
            CachedLayouts(results.root, self._name).read(path.stem)
        for path, sweep in read_sweeps(results):
            self._counts["sweep"] += 1
            if sweep is None:
                self._name(path, "its content is not that of its hash")
            else:
                self.problems += [f"{path}: sweep {sweep.name} has no record of {text}" for text in sweep.lost(results)]
        table = results.root / "table.csv"
        if table.exists() and table.read_bytes() != table_csv(sorted_records(self._records.values())).encode():
            self._name(table, "is not the table of the records; the next sweep writes it again")
        composers = {False: Composer(None), True: Composer(self._config_dir) if self._config_dir else None}
        for record in self._records.values():
            path = results.record_path(record.key)
            composer = composers[bool(record.config_dir)]
            if composer is None:
                self._name(path, f"needs code of {record.config_dir}; if you trust it, add --config-dir FOLDER")
                continue
            try:
                cell = Cell.composed(record.overrides, composer)
            except UserError as error:
                self._name(path, f"cannot be composed: {error}")
                continue
            if cell.key == record.key:
                self._cells[record.key] = replace(cell, timeline=bool(record.timeline))
            elif cell.code_version != record.code_version:
                self._others.append(record)
            else:
                self._name(path, f"its overrides and data give another key, {cell.key}")

    def recompute(self, sample: int, seed: int, processes: int = 0) -> None:
        """Simulate a random sample of the runs again, in a folder of their own, so without this folder's plans."""
        cells = {key: cell for key, cell in self._cells.items() if self._records[key].finished and is_simulated(cell)}
        self._counts["simulated"] = len(cells)
        drawn = np.random.default_rng(seed).permutation(sorted(cells))[:sample].tolist()
        with TemporaryDirectory(prefix="entrain-bench-") as folder:
            for done in run_cells([cells[key] for key in drawn], Results(Path(folder)), processes):
                if done.record is None:
                    raise UserError(done.problem)
                self._counts["recomputed"] += 1
                if difference := _difference(self._records[done.cell.key], done.record):
                    self._counts["different"] += 1
                    path = self._results.record_path(done.cell.key)
                    self._name(path, f"{difference} ({' '.join(done.cell.overrides)})")

    def verdict(self, seed: int) -> list[str]:
        """How to verify runs that today's code would not make under their keys, and one line to quote."""
        counts = self._counts
        made_by = Counter(
            f"commit {record.commit or 'unknown'} with {_listed(record.versions)}" for record in self._others
        )
        commits = sorted({record.commit[:COMMIT_LETTERS] or "unknown" for record in self._records.values()})
        other = f", {len(self._others)} of other code or libraries (not compared)" if self._others else ""
        return [
            *(f"{count(number, 'run')} of other code or libraries: {made}" for made, number in made_by.items()),
            f"{'VERIFIED' if self.right else 'NOT VERIFIED'} {self._results.root}: {count(counts['files'], 'run')} of "
            f"{count(counts['sweep'], 'recorded sweep')}, {len(self._cells)} proved by hash and key{other}; "
            f"{counts['recomputed']} of {counts['simulated']} simulated again (seed {seed}), {counts['different']} "
            f"different; {count(len(self.problems), 'problem')}; entrain-bench {version('entrain-bench')} "
            f"(commit {current_commit() or 'unknown'}; runs made at {', '.join(commits)}), {_listed(versions())}",
        ]

    @property
    def right(self) -> bool:
        """Whether nothing is wrong, and something could be compared."""
        return not self.problems and bool(self._cells)


def _listed(numbers: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in numbers.items() if name != "entrain-bench")


def _difference(record: Record, again: Record) -> str:
    """How a run came out otherwise than its record says; empty if it did not."""
    if (record.status, {**record.layout}) != (again.status, {**again.layout}):
        return f"now {again.status}, {again.layout or again.reason}; was {record.status}, {record.layout}"
    if len(record.iterations) != len(again.iterations):
        return f"now {len(again.iterations)} iterations, was {len(record.iterations)}"
    # Metrics that the user added later, as far as a kept timeline had them.
    added = {name for name in record.added if any(name not in row for row in record.iterations)}
    for was, now in zip((record.metrics, *record.iterations), (again.metrics, *again.iterations), strict=True):
        for name in sorted({*was, *now} - {*MEASURED} - added):
            if was.get(name) != now.get(name):
                return f"{name} is now {now.get(name)!r}, was {was.get(name)!r}"
    return "its timeline is another" if again.timeline_sha256 != record.timeline_sha256 else ""
