"""A Ray cluster of this machine's that ends with the process that started it, killed or not, and leaves nobody.

Ray ends most of its processes itself when the one that started it is killed, but its workers after seconds, and two
agents, which try to report the death to a server that is gone, after a minute or more (2.60; no setting of Ray's
changes that). So a process of ours is between: it starts Ray, adopts all orphans of what Ray starts, and ends them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from entrain_bench.run.workers import END_S, uninterrupted

# As Ray's own address for a new cluster.
NEW = "local"
# Results are small; what Ray would reserve is a third of the memory.
OBJECT_STORE_BYTES = 80 * 2**20
# From <linux/prctl.h>.
PR_SET_CHILD_SUBREAPER = 36


@contextmanager
def own_cluster(num_cpus: int) -> Iterator[str]:
    """Inside, there is a cluster; yields its address.

    Args:
        num_cpus: tasks that it runs at a time.

    Raises:
        ConnectionError: if Ray does not start, with what it says.
    """
    context = get_context("spawn")
    connection, theirs = context.Pipe()
    keeper = context.Process(target=_keep, args=(theirs, num_cpus))
    with uninterrupted():
        keeper.start()
    theirs.close()
    try:
        try:
            started, text = connection.recv()
        except EOFError:
            started, text = False, "Ray's parent process died"
        if not started:
            raise ConnectionError(text)
        yield text
    finally:
        # Which it waits for.
        connection.close()
        keeper.join(END_S)
        keeper.kill()
        keeper.join()


def _keep(connection: Connection, num_cpus: int) -> None:
    """Start Ray, send its address or what is wrong, and end with the process at the connection's other end."""
    _adopt_orphans()
    # From now on, for it may be killed while Ray starts.
    end = threading.Thread(target=_end_after, args=(connection,), daemon=True)
    end.start()
    settings: dict[str, Any] = {"num_cpus": num_cpus, "object_store_memory": OBJECT_STORE_BYTES}
    settings |= {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    with suppress(OSError):
        try:
            import ray

            ray.init(NEW, **settings)
            connection.send((True, ray.get_runtime_context().gcs_address))
        except (ConnectionError, RuntimeError, ValueError) as error:
            connection.send((False, str(error)))
    # Ray's processes end with the thread that started them.
    end.join()


def _end_after(connection: Connection) -> None:
    """End this process and all below it once nobody is at a connection's other end."""
    with suppress(EOFError, OSError):
        connection.recv()
    # Whom a child leaves behind is a child the next time.
    while children := _children():
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for child in children:
            with suppress(ChildProcessError):
                os.waitpid(child, 0)
    os._exit(0)


def _adopt_orphans() -> None:
    """Become the parent of every process below whose own parent ends; on Linux, elsewhere Ray is left to itself."""
    if sys.platform == "linux" and ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise RuntimeError("prctl: PR_SET_CHILD_SUBREAPER is not supported")


def _children() -> list[int]:
    """Processes whose parent this one is, as Linux lists them."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(status.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(status.parent.name))
    return found
