"""A producer: makes what ranks ask for, a bounded number of values ahead of each, into memory that they share."""

from __future__ import annotations

import traceback
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, wait
from multiprocessing.reduction import send_handle

from entrain_bench.errors import ExecutionError, UserError
from entrain_bench.train.producing.blocks import Block, Ledger
from entrain_bench.train.producing.messages import Failed, Hello, Made, Make, Maker, Released, Taken
from entrain_bench.train.producing.outline import Outline, outline_of, write_tensors
from entrain_bench.train.producing.rendezvous import Rendezvous

# Values that wait for a rank: inputs of forwards, of which the features of 5,000 tokens of 1,176 numbers take 24 MB.
LOAD_AHEAD = 4


def produce(rendezvous: Rendezvous, number: int, num_ranks: int, ahead: int) -> None:
    """Serve the ranks of a machine until all of them are gone.

    Args:
        rendezvous: where they meet.
        number: of this producer.
        num_ranks: ranks of the machine.
        ahead: values that may wait for a lane.
    """
    with rendezvous.listen(number, num_ranks) as listener:
        lines = [_accept(listener) for _ in range(num_ranks)]
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


def _accept(listener: Listener) -> Connection:
    while True:
        # Another process of this machine.
        with suppress(AuthenticationError, ConnectionError, EOFError):
            connection = listener.accept()
            assert isinstance(connection, Connection)
            return connection


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

    Attributes:
        producer: number of the producer.
        readers: lines to the ranks.
        ahead: values that may wait for them.
        shared: what makers refer to.
        lines: those that are still open.
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
        answer: Made | Failed
        try:
            outline, tensors = outline_of(self._makers.popleft()())
        except Exception as error:
            answer = _failure(self.producer, error)
            self.ledger.place(0)
        else:
            answer = self._place(outline)
            if answer.place:
                write_tensors(tensors, self._blocks[answer.place.block].tensor())
        for line in [*self.lines]:
            try:
                line.send(answer)
                if isinstance(answer, Made) and answer.place and answer.place.is_new:
                    send_handle(line, self._blocks[answer.place.block].descriptor, None)
            except OSError:
                self._lose(line)

    def _place(self, outline: Outline) -> Made:
        place = self.ledger.place(outline.num_bytes)
        if place and place.dropped is not None:
            del self._blocks[place.dropped]
        if place and place.is_new:
            self._blocks[place.block] = Block(place.size)
        return Made(outline, place)

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
