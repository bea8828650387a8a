"""What a process does with a copy of the repository: it notes which lines each test executes, or runs some tests."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType

import pytest

FOLDERS = ("entrain_bench", "strategies")
OPTIONS = ("-x", "-q", "-n0", "-p", "no:cacheprovider", "--hypothesis-seed=0", "-m", "not slow")
MEMORY_BYTES = 8 << 30


def run_pytest(copy: Path, tests: list[str], seen: Path | None) -> None:
    """Exit as pytest does: of chosen tests, in the order in which they are named, or of all there, noting lines."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    os.chdir(copy)
    sys.path[:0] = [str(copy / folder) for folder in (".", "tests", "names")]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:3])
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    files = sorted({test.partition("::")[0] for test in tests})
    sys.exit(pytest.main([*OPTIONS, *files], plugins=[Notes(seen) if seen else Choice(tests)]))


@dataclass(frozen=True, slots=True)
class Choice:
    """A plugin of pytest that keeps the chosen tests, in order."""

    tests: list[str]

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Drop the others."""
        place = {test: index for index, test in enumerate(self.tests)}
        items[:] = sorted((item for item in items if item.nodeid in place), key=lambda item: place[item.nodeid])


@dataclass(frozen=True, slots=True)
class Notes:
    """A plugin of pytest that notes which lines of the core each test executes, fixtures included, and its seconds."""

    file: Path
    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    now: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))

    def pytest_configure(self) -> None:
        """Ask Python for the lines that it executes."""
        sys.monitoring.use_tool_id(sys.monitoring.COVERAGE_ID, "mutants")
        sys.monitoring.register_callback(sys.monitoring.COVERAGE_ID, sys.monitoring.events.LINE, self.on_line)
        sys.monitoring.set_events(sys.monitoring.COVERAGE_ID, sys.monitoring.events.LINE)

    def on_line(self, code: CodeType, line: int) -> object:
        """Note a line, and do not ask again before the next test."""
        if path := _path(code.co_filename):
            self.now[path].add(line)
        return sys.monitoring.DISABLE

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Note a test."""
        self.now.clear()
        sys.monitoring.restart_events()
        start = time.perf_counter()
        result = yield
        self.seconds[item.nodeid] = time.perf_counter() - start
        self.lines[item.nodeid] = {path: sorted(numbers) for path, numbers in self.now.items()}
        return result

    def pytest_sessionfinish(self) -> None:
        """Write what was noted."""
        self.file.write_text(json.dumps([self.seconds, self.lines]))


@cache
def _path(file: str) -> str | None:
    """Path of a source of the core, whatever link it was imported by."""
    real, here = Path(os.path.realpath(file)), Path.cwd().resolve()
    path = real.relative_to(here) if real.is_relative_to(here) else Path()
    return path.as_posix() if path.parts and path.parts[0] in FOLDERS else None
