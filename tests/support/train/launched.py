"""Runs that launchers start for real, in this process and in others, and what is left of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from multiprocessing import active_children
from pathlib import Path

from support.train.ranks import NAME
from support.train.runs import SETTING

TWO_RANKS = (
    *SETTING,
    "model=tiny",
    "strategy=megatron",
    "harness.num_ranks=2",
    "cluster.gpus_per_node=2",
    "cluster.tiers=[{name: network, bandwidth_bytes_per_s: 6.0e9, latency_s: 14.0e-6}]",
)


def ranks_started() -> list[int]:
    """The processes of ranks that a launcher started, in order."""
    return sorted(process.pid for process in active_children() if process.name != NAME and process.pid)


def nothing_left(folder: Path) -> bool:
    return not ranks_started() and not list(folder.glob("entrain-bench-*"))


def start(*command: str, **variables: str) -> subprocess.Popen[str]:
    """Python with the arguments, in a session of its own."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "GLOO_SOCKET_IFNAME": "lo"}
    environment |= variables
    return subprocess.Popen(
        [sys.executable, *command], env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def processes_of_session(leader: int) -> int:
    """How many processes of a session are left."""
    left = 0
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError):
            left += os.getsid(int(entry.name)) == leader
    return left


def kill_session(leader: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
