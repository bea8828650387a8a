"""A rank's end: asks producers for values and takes them in order, in memory that it maps instead of copying."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from queue import SimpleQueue
from threading import Thread
from typing import Any

from torch import Tensor

from entrain_bench.base.errors import ExecutionError
from entrain_bench.train.producing.blocks import Block, Placement
from entrain_bench.train.producing.messages import Failed, Hello, Made, Make, Maker, Released, Taken
from entrain_bench.train.producing.rendezvous import Rendezvous


class Reader:
    """The values of a lane, dealt out to producers one by one, in turn."""

    def __init__(self, lines: Sequence[Connection], hello: Hello, timeout_s: float, *, leads: bool) -> None:
        """Introduce this rank to the producers.

        One rank ``leads`` its lane: it asks for what all are handed. It waits for a value for ``timeout_s`` at most.
        """
        self._lines, self._shared, self._timeout_s, self._leads = lines, hello.shared, timeout_s, leads
        self._blocks: list[dict[int, Block]] = [{} for _ in lines]
        # Lanes begin with different producers.
        self._next_asked = self._next_taken = hello.lane or 0
        # A tensor may be freed anywhere, in the middle of anything: whoever speaks leaves it to a thread. Each line has
        # one: a producer that is not listening holds up neither the rank nor what the others are told.
        self._said: list[SimpleQueue[bytes]] = [SimpleQueue() for _ in lines]
        introduction = pickle.dumps(hello)
        for line, said in zip(lines, self._said, strict=True):
            said.put(introduction)
            Thread(target=_speak, args=(line, said), name="reader", daemon=True).start()

    @classmethod
    def connect(cls, rendezvous: Rendezvous, hello: Hello, timeout_s: float, *, leads: bool) -> Reader:
        """A reader of all producers of a machine, once they listen."""
        lines = [rendezvous.connect(number, timeout_s) for number in range(rendezvous.num_producers)]
        return cls(lines, hello, timeout_s, leads=leads)

    def load(self, makers: Sequence[Maker]) -> Iterator[Any]:
        """What the makers return, in order; they are called in producers.

        The values of earlier calls must be taken first.

        Raises:
            ExecutionError: where a value is taken, if its producer is gone or takes too long.
            Exception: there, what the maker raised, if it is one of this suite's errors; ``ExecutionError`` otherwise.
        """
        num = len(self._lines)
        if self._leads:
            first = self._next_asked
            for offset in range(min(num, len(makers))):
                self._say((first + offset) % num, Make.of(makers[offset::num], self._shared))
        self._next_asked += len(makers)
        return (self._take() for _ in range(len(makers)))

    def _take(self) -> Any:
        number = self._next_taken % len(self._lines)
        self._next_taken += 1
        answer = self._hear(number, Connection.recv)
        assert isinstance(answer, Made)
        self._say(number, Taken())
        value = answer.outline.fill(self._memory(number, answer.place))
        if isinstance(value, Failed):
            raise value.error from ExecutionError(f"traceback of producer {number}:\n{value.trace}")
        return value

    def _memory(self, number: int, place: Placement) -> Tensor:
        blocks = self._blocks[number]
        if place.dropped is not None:
            del blocks[place.dropped]
        if place.is_new:
            blocks[place.block] = Block(place.size, self._hear(number, recv_handle))
        return blocks[place.block].tensor(partial(self._say, number, Released(place.block)))

    def _hear[T](self, number: int, receive: Callable[[Connection], T]) -> T:
        try:
            if self._lines[number].poll(self._timeout_s):
                return receive(self._lines[number])
        except (EOFError, OSError) as error:
            raise ExecutionError(f"producer {number}: is gone") from error
        raise ExecutionError(f"producer {number}: nothing came for harness.timeout_s={self._timeout_s:g}")

    def _say(self, number: int, message: Make | Taken | Released) -> None:
        self._said[number].put(pickle.dumps(message))


def _speak(line: Connection, said: SimpleQueue[bytes]) -> None:
    while True:
        message = said.get()
        # Gone; who takes its next value says so.
        with suppress(OSError):
            line.send_bytes(message)
