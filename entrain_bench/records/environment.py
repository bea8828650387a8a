"""What makes a record, besides its configuration: versions of Python and of libraries, the commit, the time."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# Libraries whose arithmetic, solvers, random numbers or parsers decide what a simulation comes to.
DECISIVE = ("hydra-core", "numba", "numpy", "omegaconf", "ortools", "pandas", "pyarrow", "scipy")
GIT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Commit:
    """The commit that the suite is at.

    Attributes:
        hash: empty outside of a repository.
        dirty: whether tracked files differ from it.
    """

    hash: str
    dirty: bool

    def __str__(self) -> str:
        return f"{self.hash}+changes" if self.dirty else self.hash


@cache
def versions() -> dict[str, str]:
    """Versions of Python, of the suite and of the decisive libraries, by name; a library that is absent is left out."""
    found = {"python": platform.python_version()}
    for name in ("entrain-bench", *DECISIVE):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@cache
def current_commit() -> Commit:
    """The commit of the suite's repository; an empty one outside of it, and where git is absent."""
    here = Path(__file__)
    if not _git(here.parent, "ls-files", "--error-unmatch", here.name):
        return Commit("", dirty=False)
    dirty = bool(_git(here.parent, "status", "--porcelain", "--untracked-files=no"))
    return Commit(_git(here.parent, "rev-parse", "HEAD"), dirty)


def now() -> str:
    """The time as ISO 8601, UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _git(folder: Path, *arguments: str) -> str:
    """What git says; empty where it fails, or is not there."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
