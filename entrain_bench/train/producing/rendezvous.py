"""Where the producers of a machine and its ranks find each other."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from entrain_bench.base.errors import ExecutionError

RETRY_S = 0.01


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Sockets of one machine's producers, in a folder that no other user may enter."""

    folder: Path
    num_producers: int

    def accept(self, producer: int, num_ranks: int) -> list[Connection]:
        """A producer's lines to the ranks of its machine, once all have come."""
        with socket.socket(socket.AF_UNIX) as listener:
            with self._address(producer) as address:
                listener.bind(address)
            listener.listen(num_ranks)
            return [Connection(listener.accept()[0].detach()) for _ in range(num_ranks)]

    def connect(self, producer: int, timeout_s: float) -> Connection:
        """A line to a producer, once it listens; ``ExecutionError`` if it does not within the time."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                with socket.socket(socket.AF_UNIX) as peer, self._address(producer) as address:
                    peer.connect(address)
                    return Connection(peer.detach())
            except OSError as error:
                if time.monotonic() > deadline:
                    late = f"producer {producer}: not there after harness.timeout_s={timeout_s:g} ({error})"
                    raise ExecutionError(late) from error
            time.sleep(RETRY_S)

    @contextmanager
    def _address(self, producer: int) -> Iterator[str]:
        """Where a producer listens; folders have longer names than sockets may."""
        folder = os.open(self.folder, os.O_PATH)
        try:
            yield f"/proc/self/fd/{folder}/producer{producer}"
        finally:
            os.close(folder)
