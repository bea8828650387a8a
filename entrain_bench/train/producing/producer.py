"""A producer: makes what ranks ask for, a bounded number of values ahead of each, into memory that they share."""

from __future__ import annotations

import socket
import traceback
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import send_handle

from entrain_bench.base.errors import ExecutionError, UserError
from entrain_bench.train.producing.blocks import Block, Ledger
from entrain_bench.train.producing.messages import Failed, Hello, Made, Make, Maker, Released, Taken
from entrain_bench.train.producing.outline import parts_of
from entrain_bench.train.producing.rendezvous import Rendezvous

# Values that wait for a rank: inputs of forwards, of which the features of 5,000 tokens of 1,176 numbers take 24 MB.
LOAD_AHEAD = 4
# What one answer, with a descriptor, takes of a socket's buffer at most; half of it was measured on Linux 6.18.
ANSWER_BYTES = 4096


def produce(rendezvous: Rendezvous, number: int, num_ranks: int, ahead: int) -> None:
    """Serve the ranks of a machine until all of them are gone.

    ``ahead`` values may wait for a lane.
    """
    lines = rendezvous.accept(number, num_ranks)
    members, shared = dict[int, list[Connection]](), None
    for line in lines:
        # A rank that ended before it said anything takes nothing.
        with suppress(EOFError, OSError):
            hello = line.recv()
            assert isinstance(hello, Hello)
            if hello.lane is not None:
                members.setdefault(hello.lane, []).append(line)
                shared = hello.shared if shared is None else shared
    serve([Lane(number, readers, ahead, shared) for _, readers in sorted(members.items())])


def serve(lanes: list[Lane]) -> None:
    """Make what lanes ask for, the one first for which least waits, until all their ranks are gone."""
    while lines := {line: lane for lane in lanes for line in lane.lines}:
        able = [lane for lane in lanes if lane.can_make]
        for line in wait([*lines], 0 if able else None):
            assert isinstance(line, Connection)
            lines[line].listen(line)
        able = [lane for lane in lanes if lane.can_make]
        if able:
            min(able, key=lambda lane: lane.ledger.num_waiting).make()


@dataclass(slots=True)
class Lane:
    """Ranks that are handed the same values.

    ``lines`` are those to ``readers`` that are still open.
    """

    producer: int
    readers: list[Connection]
    ahead: int
    shared: object = None
    ledger: Ledger = field(init=False)
    lines: list[Connection] = field(init=False)
    _makers: deque[Maker] = field(default_factory=deque)
    _blocks: dict[int, Block] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for line in self.readers:
            with socket.fromfd(line.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end:
                room = end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
            # One rank that is late must not keep the producer from all others.
            assert self.ahead * ANSWER_BYTES <= room, "net.core.wmem_default is too small: answers could block"
        self.ledger, self.lines = Ledger(len(self.readers), self.ahead), [*self.readers]

    @property
    def can_make(self) -> bool:
        """Whether there is something to make, room for it, and somebody to take it."""
        return bool(self._makers and self.lines and self.ledger.has_room)

    def listen(self, line: Connection) -> None:
        """Hear what a rank has to say, once; one that is gone says so."""
        try:
            said = line.recv()
        except (EOFError, OSError):
            self._lose(line)
            return
        match said:
            case Make():
                self._makers.extend(said.read(self.shared))
            case Taken():
                self.ledger.take(self.readers.index(line))
            case Released(block):
                self.ledger.release(block)

    def make(self) -> None:
        """Make the next value and hand it to all ranks."""
        try:
            parts = parts_of(self._makers.popleft()())
        except Exception as error:
            parts = parts_of(_failure(self.producer, error))
        place = self.ledger.place(parts.outline.end)
        if place.dropped is not None:
            del self._blocks[place.dropped]
        if place.is_new:
            self._blocks[place.block] = Block(place.size)
        block = self._blocks[place.block]
        parts.write(block.tensor())
        for line in [*self.lines]:
            try:
                line.send(Made(parts.outline, place))
                if place.is_new:
                    send_handle(line, block.descriptor, None)
            except OSError:
                self._lose(line)

    def _lose(self, line: Connection) -> None:
        # Its place among the readers stays: without it the run is about to end.
        self.lines.remove(line)
        line.close()


def _failure(producer: int, error: Exception) -> Failed:
    trace = traceback.format_exc()
    if isinstance(error, (UserError, ExecutionError)):
        return Failed(error, trace)
    line = " ".join(str(error).split())
    return Failed(ExecutionError(f"producer {producer}: {type(error).__name__}: {line}"), trace)
