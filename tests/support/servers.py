"""Servers on 127.0.0.1, for as long as a test needs them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.request import urlopen

from entrain_bench.commands.ui import QUIET

START_S, POLL_S, STOP_S = 90.0, 0.2, 30.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(command: Sequence[str], port: int) -> Iterator[subprocess.Popen[str]]:
    """A server that answers, with its standard output; it is killed in the end if it still runs.

    Raises:
        RuntimeError: if it does not start.
    """
    server = subprocess.Popen(
        [*command], env=os.environ | QUIET, start_new_session=True, stdout=subprocess.PIPE, text=True
    )
    try:
        _wait_for(server, port)
        yield server
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(STOP_S)


def _wait_for(server: subprocess.Popen[str], port: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                return
        except OSError:
            time.sleep(POLL_S)
    raise RuntimeError("the server did not start")
