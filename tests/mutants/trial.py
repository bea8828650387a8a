"""A copy of the repository, the tests that execute a line of it, and what they say of a mutant."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from .sample import Mutant
from .selection import run_pytest

CELLS = "tests/test_reference_cells.py"
DEFAULTS = "tests/test_defaults.py"
TESTS = (
    *(f"tests/{room}" for room in ("specs", "program", "costs", "simulate", "balancing", "strategies")),
    "tests/records/test_metrics.py",
    "tests/base/test_arithmetic.py",
    DEFAULTS,
    CELLS,
)
NOTHING_FAILED = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
# What tests load from elsewhere is loaded once; processes start as copies of the one that has it.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    ["hypothesis", "numba", "pandas", "pyarrow.parquet", "pytest", "scipy.optimize", "seaborn"]
)
# Compiling what a mutant touches, on a busy machine.
START_S = 45.0
# What a mutant may cost: the slowest of many tests that can notice it are left out.
STAGE_S = 20.0


def copy_repository(root: Path, target: Path) -> None:
    """Copy what git knows or would add, with the names under which the folders are imported."""
    command = ("git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (root / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name)
    (target / "names").mkdir()
    for folder in ("strategies", "workloads", "experiments"):
        (target / "names" / f"entrain_bench_{folder}").symlink_to(Path("..") / folder)


def run_tests(copy: Path, tests: Sequence[str], timeout_s: float | None = None, seen: Path | None = None) -> int | None:
    """Exit status of pytest in a copy, None after ``timeout_s``; everything that it started ends with it."""
    process = PROCESSES.Process(target=run_pytest, args=(copy, tests, seen))
    process.start()
    process.join(timeout_s)
    late = process.is_alive()
    assert process.pid is not None
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    return None if late else process.exitcode


@dataclass(frozen=True, slots=True)
class Trial:
    """The tests of a mutant.

    Attributes:
        copy: the repository without mistakes, with what it compiled.
        seconds: how long each test takes.
        lines: of each file, the tests that execute each of its lines.
    """

    copy: Path
    seconds: dict[str, float]
    lines: dict[str, dict[int, list[str]]]

    @classmethod
    def prepare(cls, root: Path, folder: Path) -> Trial:
        """Copy the repository and run the tests once; a ``ValueError`` if one of them fails."""
        copy, seen = folder / "copy", folder / "seen.json"
        copy_repository(root, copy)
        if run_tests(copy, TESTS, seen=seen) != 0:
            raise ValueError("tests fail without a mutant: see make test")
        seconds, files_of = json.loads(seen.read_text())
        lines: dict[str, dict[int, list[str]]] = {}
        for test, files in files_of.items():
            for path, numbers in files.items():
                for number in numbers:
                    lines.setdefault(path, {}).setdefault(number, []).append(test)
        return cls(copy, seconds, lines)

    def chosen(self, mutant: Mutant) -> list[list[str]]:
        """Tests that can notice: of the mirrored folder, others, whole cells; fast ones first.

        Python says nothing of compiled lines, nor of lines that run once when they are imported: whatever executes
        code of the same folder, or mirrors it, is taken for these.
        """
        folder = mutant.path.rpartition("/")[0]
        mirror = (f"tests/{folder.removeprefix('entrain_bench/')}/", DEFAULTS)
        tests = set(self.lines.get(mutant.path, {}).get(mutant.line, []))
        if not tests or "import njit" in mutant.text or "import inlined" in mutant.text:
            near = (numbers for path, numbers in self.lines.items() if path.startswith(f"{folder}/"))
            tests.update(test for numbers in near for those in numbers.values() for test in those)
            tests.update(test for test in self.seconds if test.startswith(mirror))
        stages: list[list[str]] = [[], [], []]
        for test in sorted(tests, key=lambda test: (self.seconds[test], test)):
            stages[2 if test.startswith(CELLS) else 0 if test.startswith(mirror) else 1].append(test)
        ends = ([*accumulate(self.seconds[test] for test in stage)] for stage in stages)
        kept = (stage[: bisect_right(end, STAGE_S)] for stage, end in zip(stages, ends, strict=True))
        return [stage for stage in kept if stage]

    def judge(self, mutant: Mutant) -> str:
        """Whether the tests have ``killed`` a mutant, taken too long (``timeout``), or it ``survived``."""
        with TemporaryDirectory() as folder:
            copy = Path(folder) / "copy"
            shutil.copytree(self.copy, copy, symlinks=True)
            (copy / mutant.path).write_text(mutant.text)
            for tests in self.chosen(mutant):
                status = run_tests(copy, tests, START_S + 4 * sum(self.seconds[test] for test in tests))
                if status not in NOTHING_FAILED:
                    return "timeout" if status is None else "killed"
        return "survived"
