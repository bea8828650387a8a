"""A producer: makes what ranks ask for, a bounded number of values ahead of each, into memory that they share."""

from __future__ import annotations

import json
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import send_handle
from typing import Any

from entrain_bench.train.messages.failure import Failure
from entrain_bench.train.messages.wire import from_bytes, parts_of
from entrain_bench.train.producing.blocks import Block, Ledger

# Values that wait for a rank: inputs of forwards, of which the features of 5,000 tokens of 1,176 numbers take 24 MB.
LOAD_AHEAD = 4
# What one answer, with a descriptor, takes of a socket's buffer at most; half of it was measured on Linux 6.18.
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
            min(able, key=lambda lane: lane.ledger.num_waiting).make()


@dataclass(slots=True)
class Lane:
    """Ranks that are handed the same values; ``lines`` are those to ``readers`` that are still open."""

    producer: int
    readers: list[Connection]
    ahead: int
    makers_of: MakersOf
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
            said = line.recv_bytes()
        except (EOFError, OSError):
            self._lose(line)
            return
        match from_bytes(said):
            case {"make": asked}:
                self._makers.extend(self.makers_of(asked))
            case {"released": block}:
                self.ledger.release(block)
            case "taken":
                self.ledger.take(self.readers.index(line))

    def make(self) -> None:
        """Make the next value and hand it to all ranks."""
        try:
            parts = parts_of({"value": self._makers.popleft()()})
        except Exception as error:
            parts = parts_of({"failure": asdict(Failure.of(error, f"producer {self.producer}"))})
        place = self.ledger.place(parts.size)
        if place.dropped is not None:
            del self._blocks[place.dropped]
        if place.is_new:
            self._blocks[place.block] = Block(place.size)
        block = self._blocks[place.block]
        parts.write(block.tensor().numpy())
        for line in [*self.lines]:
            try:
                line.send_bytes(json.dumps(asdict(place)).encode())
                if place.is_new:
                    send_handle(line, block.descriptor, None)
            except OSError:
                self._lose(line)

    def _lose(self, line: Connection) -> None:
        # Its place among the readers stays: without it the run is about to end.
        self.lines.remove(line)
        line.close()
