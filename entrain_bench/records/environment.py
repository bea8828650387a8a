"""Environment of a record: versions of Python and of libraries, the commit, the time."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# Libraries that a record names: their arithmetic, solvers, random numbers, compilers or parsers decide results.
DECISIVE = ("numba", "llvmlite", "numpy", "ortools", "pandas", "pyarrow", "scipy", "torch", "megatron-core")
# What modules belong to, where it is not called as they are; a compiler decides with what it compiles by.
DISTRIBUTIONS = {
    "PIL": ("pillow",),
    "matplotlib": ("matplotlib", "pillow"),
    "megatron": ("megatron-core",),
    "numba": ("numba", "llvmlite"),
}
# Resolve configurations, which keys hold resolved, or start processes: they decide no result.
INDIFFERENT = frozenset({"hydra", "omegaconf", "ray", "yaml"})
GIT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Commit:
    """The commit that the suite is at, empty outside of a repository, and whether tracked files differ from it."""

    hash: str
    dirty: bool

    def __str__(self) -> str:
        return f"{self.hash}+changes" if self.dirty else self.hash


@cache
def versions() -> dict[str, str]:
    """Versions of Python, of the suite and of the decisive libraries, by name; a library that is absent is left out."""
    return {"python": platform.python_version()} | _installed(("entrain-bench", *DECISIVE))


@cache
def releases_of(module: str) -> str:
    """Versions of a top-level module's library for keys; empty if it is Python's, decides nothing, or is absent."""
    if module in INDIFFERENT or module in sys.stdlib_module_names:
        return ""
    return " ".join(f"{name}=={one}" for name, one in _installed(DISTRIBUTIONS.get(module, (module,))).items())


def _installed(names: Sequence[str]) -> dict[str, str]:
    found = {}
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def made_by() -> dict[str, Any]:
    """Read ``versions``, ``commit`` and ``made_at`` of a file."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"versions": versions(), "commit": str(current_commit()), "made_at": now}


@cache
def current_commit() -> Commit:
    """The commit of the suite's repository; an empty one outside of it, and where git is absent."""
    here = Path(__file__)
    if not _git(here.parent, "ls-files", "--error-unmatch", here.name):
        return Commit("", dirty=False)
    dirty = bool(_git(here.parent, "status", "--porcelain", "--untracked-files=no"))
    return Commit(_git(here.parent, "rev-parse", "HEAD"), dirty)


def _git(folder: Path, *arguments: str) -> str:
    """Return git's output; empty if git fails or is not installed."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
