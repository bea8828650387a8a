"""A folder of 40 runs, changed; what every command then says of it."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import numpy as np

from entrain_bench.answers.console_table import print_table
from entrain_bench.answers.report import read_answer, report_json
from entrain_bench.answers.tables import run_table
from entrain_bench.answers.tracking.entries import NOTE_TAG, entries_of
from entrain_bench.base import files
from entrain_bench.base.errors import UserError
from entrain_bench.cli import run_command
from entrain_bench.commands.verify import Verification
from entrain_bench.program.layout import layout_to_json
from entrain_bench.records.cells import Cell
from entrain_bench.records.records import PlannedSweep, Record, Results, read_sweeps
from entrain_bench.records.sealed import CachedLayout, CachedLayouts
from entrain_bench.records.tables import write_tables
from entrain_bench.run.cells import compose_cells

from .changes import CHANGES

JOB = ("model=tiny", "cluster=tiny", "global_batch=16", "microbatch_size=2", "layout.tp=1", "layout.dp=2")
SWEEP = (
    *("strategy=megatron,entrain,orchmllm,token_budget,megatron_schedules", "seed=0,1,2,3", *JOB),
    *("workload=chartqa,coco", "iterations=1", "mlflow=false"),
)
NUM_CELLS = 40
# Of the trials, those that run the sweep again, on a full disk or not.
RERUN_EVERY = 25
WINNER = re.compile(r"\S+ is the fastest of [^.(]* on \w+")


@dataclass(frozen=True)
class Folder:
    """The folder before it is changed.

    Attributes:
        root: where it is.
        records: its records by key.
        plans: its cached plans by key.
        sweep: its sweep.
        cells: the cells of the sweep.
    """

    root: Path
    records: dict[str, Record]
    plans: dict[str, CachedLayout]
    sweep: PlannedSweep
    cells: Sequence[Cell]

    @classmethod
    def made(cls, root: Path) -> Folder:
        """Run the sweep."""
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            assert run_command(["--multirun", *SWEEP, f"results_dir={root}"]) == 0
        results = Results(root)
        records = {record.key: record for record in results.records()}
        plans = {path.stem: CachedLayouts(root).read(path.stem) for path in (root / "plans").glob("*.json")}
        ((_, sweep),) = read_sweeps(results)
        assert sweep
        cells = compose_cells(SWEEP, multirun=True)
        assert records.keys() == {cell.key for cell in cells}
        assert len(cells) == NUM_CELLS
        return cls(root, records, {key: plan for key, plan in plans.items() if plan}, sweep, cells)

    def copy(self, place: Path) -> Path:
        """The folder again, of links to its files, which changes replace."""
        shutil.copytree(self.root, place, copy_function=os.link)
        return place


def problem_of(folder: Folder, place: Path, seed: int, number: int) -> str:
    """Change a copy of the folder; returns what came out wrong, nothing if all is right."""
    chance = np.random.default_rng([seed, number])
    root = folder.copy(place)
    try:
        made = [_changed(chance, root) for _ in range(int(chance.integers(1, 4)))]
        try:
            _check(folder, root)
            if number % RERUN_EVERY == 0:
                _run_again(folder, root, chance)
        except Exception as error:
            return f"{'; '.join(made)}: {type(error).__name__}: {error}"
        return ""
    finally:
        shutil.rmtree(root)


def _changed(chance: np.random.Generator, root: Path) -> str:
    change = CHANGES[int(chance.integers(len(CHANGES)))]
    try:
        return change(chance, root)
    except (ValueError, KeyError, TypeError):
        # An earlier change has left nothing to edit.
        return f"no {change.__name__}"


def _check(folder: Folder, root: Path) -> None:
    """Check that everything in the folder is as before, named, or gone."""
    problems = Verification(root, "")
    problems.read_all()
    named = dict[Path, str]()
    results = Results(root, named.__setitem__)
    found = {record.key: record for record in results.records()}
    for key, record in folder.records.items():
        path = results.record_path(key)
        # A record says what it said; or it is gone, or named.
        assert found.get(key, record) == record, f"{path} is believed"
        assert key in found or path in named or not path.exists(), f"{path} is left out in silence"
        if record.timeline and key in found:
            path, timeline = results.timeline_path(key), results.timeline(record)
            assert timeline is None or path.read_bytes() == (folder.root / path.relative_to(root)).read_bytes()
            assert timeline is not None or path in named or not path.exists(), f"{path} is left out in silence"
    assert found.keys() <= folder.records.keys()
    for key, plan in folder.plans.items():
        read = CachedLayouts(root, named.__setitem__).read(key)
        path = root / "plans" / f"{key}.json"
        assert read is None or _plan_text(read) == _plan_text(plan), f"{path} is believed"
        assert read is not None or path in named or not path.exists(), f"{path} is left out in silence"
    lost = len(found) < NUM_CELLS
    assert problems.problems or (not named and not lost), "verify has found nothing"
    _same_winners(folder, results, list(found.values()))


def _plan_text(plan: CachedLayout) -> str:
    return f"{layout_to_json(plan.layout)} {plan.planning_time_s!r}"


def _same_winners(folder: Folder, results: Results, records: Sequence[Record]) -> None:
    """Terminal, report, MLflow and figures say the same of the folder."""
    known, shown = folder.sweep, StringIO()
    cells = [key for key in known.cells if results.read(key)]
    lost = known.lost(results)
    with redirect_stdout(shown):
        print_table([record for key in cells if (record := results.read(key))], lost)
    terminal = " ".join(shown.getvalue().split())
    if not records:
        return
    try:
        report = " ".join(json.loads(report_json(read_answer(results)[0], str(results.root)))["sentences"])
    except UserError as error:
        raise AssertionError(f"report ended with: {error}") from error
    note = entries_of(results, records, "any", lost=lost)[0].tags[NOTE_TAG]
    winners = [sorted(WINNER.findall(text.replace("**", ""))) for text in (terminal, report, " ".join(note.split()))]
    assert winners[0] == winners[1] == winners[2], f"winners differ: {winners}"
    # Figures and claims read rows of the sweep.
    assert (run_table(folder.cells, results)["status"] == "missing").sum() == NUM_CELLS - len(records)
    swept = any(sweep for _, sweep in read_sweeps(results))
    for text in (terminal, note, *([report] if swept else [])):
        assert not lost or f"{len(lost)} of {NUM_CELLS} planned runs left no record" in " ".join(text.split()), text
    write_tables(results)
    assert len((results.root / "table.csv").read_text().splitlines()) == len(records) + 1


def _run_again(folder: Folder, root: Path, chance: np.random.Generator) -> None:
    """The sweep ends at once where the disk is full; with room it leaves the folder as it was."""
    command = ["--multirun", *SWEEP, f"results_dir={root}"]
    missing = [key for key in folder.records if Results(root, lambda *_: None).read(key) is None]
    if missing:
        with full_disk(int(chance.integers(len(missing)))):
            code, out, err = _run(command)
        assert code == 2, err
        assert "planned runs left no record" in " ".join(out.split()), out
    code, out, err = _run(command)
    assert code == 0, err
    assert "internal error" not in err, err
    whole = {record.key: record.computed for record in Results(root).records()}
    assert whole == {key: record.computed for key, record in folder.records.items()}
    verification = Verification(root, "")
    verification.read_all()
    left = [line for line in verification.problems if "/timelines/" not in line and "/plans/" not in line]
    assert not left, left


def _run(command: Sequence[str]) -> tuple[int, str, str]:
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = run_command(command)
    return code, out.getvalue(), err.getvalue()


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """A disk that has room for so many records, and for nothing after them."""
    sync, written = os.fsync, 0

    def fsync(number: int) -> None:
        nonlocal written
        path = Path(f"/proc/self/fd/{number}").readlink()
        is_record = path.parent.parent.name == "runs"
        if written > room or (is_record and written == room):
            written = room + 1
            raise OSError(errno.ENOSPC, "No space left on device")
        written += is_record
        sync(number)

    with patch.object(files.os, "fsync", fsync):
        yield
