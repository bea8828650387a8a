"""Processes of this machine, as /proc lists them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def children_of(pid: int) -> set[int]:
    found = set[int]()
    # Every thread has its own.
    for listed in Path("/proc").glob(f"{pid}/task/*/children"):
        with suppress(OSError):
            found |= {*map(int, listed.read_text().split())}
    return found


def workers_of(pid: int) -> set[int]:
    """Children started to work, by ``multiprocessing`` or loky, not their helpers."""
    marks = (b"spawn_main", b"popen_loky")
    return {child for child in children_of(pid) if any(mark in command(child) for mark in marks)}


def descendants_of(pid: int) -> set[int]:
    """Processes that a process started, and those that they started, and so on."""
    return {found for child in children_of(pid) for found in (child, *descendants_of(child))}


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def own_workers() -> set[int]:
    return workers_of(os.getpid())


def command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
