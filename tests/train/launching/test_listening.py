"""Training on one machine listens to nobody outside: every socket of every process is on the loopback interface."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path

import pytest
import torch.distributed as dist

from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import run_experiment
from support.processes import descendants_of
from support.train.runs import DISJOINT, SETTING

# State of a socket in /proc/net/tcp.
LISTENS = "0A"


def sockets_of(processes: set[int]) -> dict[str, int]:
    """The process of each socket, by its inode."""
    owners = {}
    for process in processes:
        with suppress(FileNotFoundError, ProcessLookupError):
            for descriptor in Path(f"/proc/{process}/fd").iterdir():
                with suppress(FileNotFoundError):
                    kind, _, inode = str(descriptor.readlink()).partition(":")
                    if kind == "socket":
                        owners[inode.strip("[]")] = process
    return owners


def listeners(processes: set[int]) -> set[tuple[int, str]]:
    """Processes that listen for TCP connections, and at which address."""
    found, owners = set(), sockets_of(processes)
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTENS and (process := owners.get(rest[5])):
                words = bytes.fromhex(local.partition(":")[0])
                # The kernel writes words of four bytes in the order of the machine.
                address = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                found.add((process, str(ip_address(address))))
    return found


@contextmanager
def watching() -> Iterator[set[tuple[int, str]]]:
    """All listeners among this process and those below it, while it does something."""
    seen: set[tuple[int, str]] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.05):
            seen.update(listeners({os.getpid(), *descendants_of(os.getpid())}))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def outside(seen: set[tuple[int, str]]) -> set[str]:
    return {address for _, address in seen if not ip_address(address).is_loopback}


def test_a_socket_that_others_reach_is_found() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert outside(listeners({os.getpid()})) == {"::"}
    del store


@pytest.mark.wide
def test_training_listens_on_loopback_only(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What a user may have set for jobs on several machines.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    run = ["harness.preprocessing=processes", "harness.preprocessing_processes=1", "iterations=2"]
    config = compose_cells([*SETTING, *DISJOINT, *run])[0].config
    with watching() as seen:
        assert len(run_experiment(config).iterations) == 2
    assert outside(seen) == set()
    # The store of this process, and every rank; workers of ranks hold their sockets, too.
    assert len({process for process, _ in seen}) >= 5
    assert not list(temporary.glob("entrain-bench-*"))
