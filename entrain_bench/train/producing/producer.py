"""A producer: makes what ranks ask for, a bounded number of values ahead of each, into memory that they share.

Shared memory has no name: it is gone when the last process that maps it lets go of it, however that one ends. Python's
own has a name in ``/dev/shm``, which stays if all who know it are killed, and counts against the few MiB that
containers often allow there.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import send_handle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entrain_bench.train.messages.failure import Failure
from entrain_bench.train.messages.wire import from_bytes, parts_of

# Values that wait for a rank: inputs of forwards, of which the features of 5,000 tokens of 1,176 numbers take 24 MB.
LOAD_AHEAD = 4
# What a descriptor takes of a socket's buffer at most; half of it was measured on Linux 6.18.
ANSWER_BYTES = 4096

# Makes one value that ``wire`` can hold.
type Maker = Callable[[], Any]
# The makers of what a rank asks for at once.
type MakersOf = Callable[[Any], Sequence[Maker]]


def produce(lines: Sequence[Connection], number: int, ahead: int, makers_of: MakersOf) -> None:
    """Serve the ranks of a machine until all of them are gone; ``ahead`` values may wait for a lane."""
    members = dict[int, list[Connection]]()
    for line in lines:
        # A rank that ended before it said anything takes nothing.
        with suppress(EOFError, OSError):
            if (lane := from_bytes(line.recv_bytes())["lane"]) is not None:
                members.setdefault(lane, []).append(line)
    serve([Lane(number, readers, ahead, makers_of) for _, readers in sorted(members.items())])


def serve(lanes: list[Lane]) -> None:
    """Make what lanes ask for, the one first for which least waits, until all their ranks are gone."""
    while lines := {line: lane for lane in lanes for line in lane.lines}:
        able = [lane for lane in lanes if lane.can_make]
        for line in wait([*lines], 0 if able else None):
            assert isinstance(line, Connection)
            lines[line].listen(line)
        able = [lane for lane in lanes if lane.can_make]
        if able:
            min(able, key=lambda lane: lane.num_waiting).make()


@dataclass(slots=True)
class Lane:
    """Ranks that are handed the same values, of which ``ahead`` at most wait for the slowest.

    ``lines`` are those to ``readers`` that are still open.
    """

    producer: int
    readers: list[Connection]
    ahead: int
    makers_of: MakersOf
    lines: list[Connection] = field(init=False)
    _makers: deque[Maker] = field(default_factory=deque)
    _waiting: list[int] = field(init=False)

    def __post_init__(self) -> None:
        for line in self.readers:
            with socket.fromfd(line.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end:
                room = end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
            # One rank that is late must not keep the producer from all others.
            assert self.ahead * ANSWER_BYTES <= room, "net.core.wmem_default is too small: answers could block"
        self.lines = [*self.readers]
        self._waiting = [0] * len(self.readers)

    @property
    def num_waiting(self) -> int:
        """Values that the slowest rank has not taken."""
        return max(self._waiting)

    @property
    def can_make(self) -> bool:
        """Whether there is something to make, room for it, and somebody to take it."""
        return bool(self._makers and self.lines and self.num_waiting < self.ahead)

    def listen(self, line: Connection) -> None:
        """Hear what a rank has to say, once; one that is gone says so."""
        try:
            said = line.recv_bytes()
        except (EOFError, OSError):
            self._lose(line)
            return
        match from_bytes(said):
            case {"make": asked}:
                self._makers.extend(self.makers_of(asked))
            case "taken":
                self._waiting[self.readers.index(line)] -= 1

    def make(self) -> None:
        """Make the next value and hand it to all ranks."""
        try:
            parts = parts_of({"value": self._makers.popleft()()})
        except Exception as error:
            parts = parts_of({"failure": asdict(Failure.of(error, f"producer {self.producer}"))})
        self._waiting = [waiting + 1 for waiting in self._waiting]
        descriptor = os.memfd_create("entrain-bench")
        try:
            os.ftruncate(descriptor, parts.size)
            parts.write(mapped(descriptor))
            for line in [*self.lines]:
                try:
                    send_handle(line, descriptor, None)
                except OSError:
                    self._lose(line)
        finally:
            os.close(descriptor)

    def _lose(self, line: Connection) -> None:
        # Its place among the readers stays: without it the run is about to end.
        self.lines.remove(line)
        line.close()


def mapped(descriptor: int) -> NDArray[np.uint8]:
    """All memory behind a descriptor ``[bytes]``; it lasts as long as the array and its views."""
    return np.frombuffer(mmap.mmap(descriptor, os.fstat(descriptor).st_size), np.uint8)
