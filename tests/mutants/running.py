"""Runs tests in a process of its own, on a copy of the repository: to note what they execute, or to see one fail."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from inspect import CO_OPTIMIZED
from multiprocessing import get_context
from pathlib import Path
from sys import monitoring
from types import CodeType

import pytest
from numba.core.caching import _SourceFileBackedLocatorMixin as Located
from numba.core.dispatcher import Dispatcher

# Tests of one mutant, by their usual CPU seconds together at most; if all of them pass, it survives.
BUDGET_S = 120
# A test that takes ten times its usual CPU time, beside that of compiling loops, does not end.
LONGEST = 10
COMPILING_S = 100
# Sources that decide, beside the file of a test, which lines it executes.
SOURCES = ("entrain_bench", "strategies", "workloads", "experiments", "tests/support")
# Packages that the core imports are imported once for all processes.
processes = get_context("forkserver")
THEIRS = ("hydra.utils", "hypothesis.extra.numpy", "matplotlib", "numba", "ortools.sat.python.cp_model", "pandas")
processes.set_forkserver_preload(["mutants.running", "pyarrow.parquet", "scipy.optimize", "scipy.stats", *THEIRS])


class Coverage:
    """CPU seconds of each test, and tests by path and line of a function that they execute."""

    def __init__(self, records: Iterable[Path]) -> None:
        self.seconds: dict[str, float] = {}
        self.lines: dict[tuple[str, int], set[str]] = {}
        for record in records:
            seconds, executed = json.loads(record.read_text())
            self.seconds |= seconds
            tests = [*seconds]
            for path, line, numbers in executed:
                self.lines.setdefault((path, line), set()).update(tests[number] for number in numbers)

    def choose(self, path: str, line: int, mirror: tuple[str, ...], whole: tuple[str, ...]) -> dict[str, float]:
        """Tests to execute and their seconds: those of a line, of its file's mirror, of the file, and whole runs.

        Of a compiled loop the decorator alone is known, of what runs at import or once for several tests nothing.
        """
        of_mirror = {test for test in self.seconds if test.startswith(mirror)}
        others = {test for test in self.seconds if test.startswith(whole)}
        others.update(*(tests for place, tests in self.lines.items() if place[0] == path))
        chosen: dict[str, float] = {}
        for tests in (self.lines.get((path, line), set()), of_mirror, others):
            for test in sorted(tests - chosen.keys(), key=lambda test: (self.seconds[test], test)):
                if sum(chosen.values()) + self.seconds[test] <= BUDGET_S:
                    chosen[test] = self.seconds[test]
        return chosen


def list_records(root: Path, files: Iterable[str], folder: Path) -> dict[str, Path]:
    """Where what the tests of each file execute is kept: named by the content of the file and of the sources."""
    sources = [path for part in SOURCES for path in sorted((root / part).rglob("*")) if path.suffix in (".py", ".yaml")]
    key = sha256(b"".join(path.read_bytes() for path in sources)).digest()
    records = {file: folder / f"{sha256(key + (root / file).read_bytes()).hexdigest()}.json" for file in files}
    folder.mkdir(parents=True, exist_ok=True)
    for old in {*folder.iterdir()} - {*records.values()}:
        old.unlink()
    return records


def copy_repository(root: Path, copy: Path) -> Path:
    """A copy in which the packages are imported under their names."""
    shutil.copytree(root, copy, ignore=shutil.ignore_patterns(".venv", ".git", "build", "results", ".*_cache"))
    shutil.copytree(root / "results" / "reference", copy / "results" / "reference")
    (copy / "names").mkdir()
    for part in ("strategies", "workloads", "experiments"):
        (copy / "names" / f"entrain_bench_{part}").symlink_to(Path("..") / part)
    return copy


def passes(copy: Path, loops: Path, seconds: Mapping[str, float], record: Path | None = None) -> bool:
    """Whether tests pass, in their order, each in a few times its usual CPU seconds; or record those of a file.

    A folder keeps compiled loops, by their names alone.
    """
    process = processes.Process(target=_execute, args=(copy, loops, seconds, record))
    process.start()
    process.join()
    return process.exitcode == 0


def _execute(copy: Path, loops: Path, seconds: Mapping[str, float], record: Path | None) -> None:
    os.chdir(copy)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    sys.path[:0] = map(str, (copy, copy / "tests", copy / "names"))
    from entrain_bench.base import compiled

    compiled._cache_of = lambda package: loops / package  # type: ignore[assignment]
    Located.get_source_stamp = lambda _: 0  # type: ignore[method-assign]
    Located.get_suitable_cache_subpath = lambda _, file: Path(file).parent.name  # type: ignore[attr-defined]
    options = ["-q", "-n0", "--timeout=0", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    options += ["-m", "not slow and not site", *([] if record else ["-x"])]
    files = {test.partition("::")[0] for test in seconds}
    sys.exit(pytest.main([*options, *sorted(files)], [_Record(copy, record) if record else _Choice(seconds)]))


def _cpu_s() -> float:
    return sum(os.times()[:4])


class _Choice:
    """Executes some tests, in their order; an endless one ends the process."""

    def __init__(self, seconds: Mapping[str, float]) -> None:
        self.seconds = seconds

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        tests = {item.nodeid: item for item in items}
        items[:] = [tests[test] for test in self.seconds if test in tests]

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        limit = int(_cpu_s() + COMPILING_S + LONGEST * self.seconds[item.nodeid])
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


class _Record:
    """Notes the CPU seconds of each test that passes, and the lines of the core's functions that it executes."""

    def __init__(self, copy: Path, file: Path) -> None:
        self.file = file
        self.copy = copy
        self.core = tuple(f"{copy}{os.sep}{folder}{os.sep}" for folder in ("entrain_bench", "names", "strategies"))
        self.seconds: dict[str, float] = {}
        self.tests: dict[tuple[str, int], list[int]] = {}
        self.lines: set[tuple[str, int]] = set()
        monitoring.use_tool_id(monitoring.PROFILER_ID, "mutants")
        monitoring.register_callback(monitoring.PROFILER_ID, monitoring.events.LINE, self.note)
        monitoring.register_callback(monitoring.PROFILER_ID, monitoring.events.CALL, self.note_compiled)
        monitoring.set_events(monitoring.PROFILER_ID, monitoring.events.LINE | monitoring.events.CALL)

    def note(self, code: CodeType, line: int) -> object:
        """Note a line; it is not reported again before the next test."""
        if code.co_filename.startswith(self.core) and code.co_flags & CO_OPTIMIZED:
            self.lines.add((code.co_filename, line))
        return monitoring.DISABLE

    def note_compiled(self, code: CodeType, offset: int, function: object, first: object) -> object:  # noqa: ARG002
        """Note the line of a compiled loop's decorator if Python calls it."""
        if isinstance(function, Dispatcher):
            self.note(function.__code__, function.__code__.co_firstlineno)
        return monitoring.DISABLE

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        failed = item.session.testsfailed
        start_s = _cpu_s()
        self.lines.clear()
        monitoring.restart_events()
        result = yield
        if item.session.testsfailed == failed:
            for place in self.lines:
                self.tests.setdefault(place, []).append(len(self.seconds))
            self.seconds[item.nodeid] = _cpu_s() - start_s
        return result

    def pytest_sessionfinish(self) -> None:
        executed = [
            (os.path.relpath(os.path.realpath(path), self.copy), line, numbers)
            for (path, line), numbers in self.tests.items()
        ]
        self.file.write_text(json.dumps([self.seconds, executed]))
