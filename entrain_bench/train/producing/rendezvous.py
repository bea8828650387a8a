"""Where the producers of a machine and its ranks find each other."""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from threading import Timer

from entrain_bench.base.errors import ExecutionError

RETRY_S = 0.01
# A rank answers at once, and tries again if it was too late; who says nothing must not hold up the others for long.
HANDSHAKE_S = 5.0
# Process, user and group of the other end, as Linux has them.
CREDENTIALS = struct.Struct("iII")


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Sockets of one machine's producers; their names are no files, so nothing is left of them.

    Every user of the machine can see the names and connect. Who is another user, does not know the key, or is silent
    is turned away.
    """

    name: str
    key: str
    num_producers: int

    @classmethod
    def new(cls, num_producers: int) -> Rendezvous:
        """One that nobody can guess."""
        return cls(f"entrain-bench-{secrets.token_hex(8)}", secrets.token_hex(16), num_producers)

    def to_json(self) -> str:
        """For ``from_json``."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Rendezvous:
        """What ``to_json`` wrote."""
        return cls(**json.loads(text))

    def accept(self, producer: int, num_ranks: int, handshake_s: float = HANDSHAKE_S) -> list[Connection]:
        """A producer's lines to the ranks of its machine, once all have come."""
        lines: list[Connection] = []
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._address(producer))
            listener.listen(num_ranks)
            while len(lines) < num_ranks:
                peer, _ = listener.accept()
                # Whatever is wrong with one that connects is between it and nobody else.
                with peer, suppress(AuthenticationError, EOFError, OSError, ValueError):
                    lines.append(self._meet(peer, handshake_s, deliver_challenge, answer_challenge))
        return lines

    def connect(self, producer: int, timeout_s: float) -> Connection:
        """A line to a producer, once it listens.

        Raises:
            ExecutionError: if it does not answer within the time.
            AuthenticationError: if another process has its name.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                with socket.socket(socket.AF_UNIX) as peer:
                    # With a timeout, a full queue is an error, too.
                    peer.settimeout(timeout_s)
                    peer.connect(self._address(producer))
                    return self._meet(peer, deadline - time.monotonic(), answer_challenge, deliver_challenge)
            except (EOFError, OSError) as error:
                if time.monotonic() > deadline:
                    raise ExecutionError(
                        f"producer {producer}: not there after harness.timeout_s={timeout_s:g} "
                        f"({str(error) or 'it says nothing'})"
                    ) from error
            time.sleep(RETRY_S)

    def _meet(self, peer: socket.socket, timeout_s: float, *steps: Callable[[Connection, bytes], None]) -> Connection:
        """A line to the other end if it is a process of the same user and passes the steps in time."""
        credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        if CREDENTIALS.unpack(credentials)[1] != os.geteuid():
            raise AuthenticationError("a process of another user")
        peer.setblocking(True)
        line = Connection(os.dup(peer.fileno()))
        # Ends the wait for whoever says nothing, or one byte at a time.
        timer = Timer(max(timeout_s, 0.0), peer.shutdown, (socket.SHUT_RDWR,))
        timer.start()
        try:
            for step in steps:
                step(line, self.key.encode())
        except BaseException:
            line.close()
            raise
        finally:
            timer.cancel()
            timer.join()
        return line

    def _address(self, producer: int) -> str:
        return f"\0{self.name}-{producer}"
