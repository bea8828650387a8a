"""A local Ray cluster that ends with the process that started it, even if that process is killed.

If the starting process is killed, Ray 2.60 ends most of its processes, but its workers only after seconds and two
agents after a minute or more, because they try to reach a server that is gone. No setting of Ray changes that. So a
supervisor process starts Ray, adopts all orphans, and ends them.
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
    """Context manager that starts a cluster and yields its address.

    Args:
        num_cpus: number of parallel tasks.

    Raises:
        ConnectionError: if Ray does not start; contains Ray's message.
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
            started = False
            text = "Ray's parent process died"
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
    """Start Ray, send its address or its error, and end when the other end of the connection closes."""
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
    """End this process and all its descendants when the other end of a connection closes."""
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
    """Adopt every descendant whose parent ends. Linux only; on other systems Ray cleans up."""
    if sys.platform == "linux" and ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise RuntimeError("prctl: PR_SET_CHILD_SUBREAPER is not supported")


def _children() -> list[int]:
    """Return the child processes of this one, as Linux lists them."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(status.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(status.parent.name))
    return found
