"""Where producers and ranks of a machine meet, and a rank's end: it asks for values and takes them in order.

Values lie in memory that the rank maps instead of copying.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from entrain_bench.base.errors import ExecutionError
from entrain_bench.train.messages.failure import Failure
from entrain_bench.train.messages.wire import to_bytes, value_in
from entrain_bench.train.producing.producer import mapped

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


class Reader:
    """The values of a lane, dealt out to producers one by one, in turn."""

    def __init__(self, lines: Sequence[Connection], lane: int | None, timeout_s: float, *, leads: bool) -> None:
        """Introduce this rank to the producers; ranks of one lane are handed the same values, one of none nothing.

        One rank ``leads`` its lane: it asks for what all are handed. It waits for a value for ``timeout_s`` at most.
        """
        self._lines = lines
        self._timeout_s = timeout_s
        self._leads = leads
        # Lanes begin with different producers.
        self._next_asked = self._next_taken = lane or 0
        # A thread of each line speaks: a producer that is not listening holds up neither the rank nor what the others
        # are told.
        self._said: list[SimpleQueue[bytes]] = [SimpleQueue() for _ in lines]
        for number, (line, said) in enumerate(zip(lines, self._said, strict=True)):
            self._say(number, {"lane": lane})
            Thread(target=_speak, args=(line, said), name="reader", daemon=True).start()

    def load(self, common: Mapping[str, Any], asked: Sequence[Any]) -> Iterator[Any]:
        """Yield the value that producers make for each request, in order; ``common`` goes with every request.

        The values of earlier calls must be taken first. What making one raised, or its producer, is raised there.
        """
        num = len(self._lines)
        if self._leads:
            first = self._next_asked
            for offset in range(min(num, len(asked))):
                self._say((first + offset) % num, {"make": {**common, "asked": asked[offset::num]}})
        self._next_asked += len(asked)
        return (self._take() for _ in range(len(asked)))

    def _take(self) -> Any:
        number = self._next_taken % len(self._lines)
        self._next_taken += 1
        descriptor = self._hear(number)
        self._say(number, "taken")
        made = value_in(mapped(descriptor))
        os.close(descriptor)
        if "failure" in made:
            raise Failure(**made["failure"]).as_error()
        return made["value"]

    def _hear(self, number: int) -> int:
        """The descriptor of a producer's next value."""
        try:
            if self._lines[number].poll(self._timeout_s):
                return recv_handle(self._lines[number])
        except (EOFError, OSError) as error:
            raise ExecutionError(f"producer {number}: closed its connection") from error
        raise ExecutionError(f"producer {number}: sent nothing for harness.timeout_s={self._timeout_s:g} s")

    def _say(self, number: int, message: Any) -> None:
        self._said[number].put(to_bytes(message))


def _speak(line: Connection, said: SimpleQueue[bytes]) -> None:
    while True:
        message = said.get()
        # Gone; who takes its next value says so.
        with suppress(OSError):
            line.send_bytes(message)
