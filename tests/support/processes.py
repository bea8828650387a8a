"""Processes of this machine, as /proc lists them."""

from __future__ import annotations

import os
from pathlib import Path


def children_of(pid: int) -> set[int]:
    """Processes that a process started and that still run."""
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    return {int(child) for child in listed.read_text().split()} if listed.exists() else set()


def workers_of(pid: int) -> set[int]:
    """Children started by ``multiprocessing`` to work, not its helpers."""
    return {child for child in children_of(pid) if b"spawn_main" in _command(child)}


def runs(pid: int) -> bool:
    """Whether a process runs: it is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def own_workers() -> set[int]:
    """Workers of this process."""
    return workers_of(os.getpid())


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
