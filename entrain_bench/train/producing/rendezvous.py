"""Where the producers of a machine and its ranks find each other."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Client, Connection, Listener

from entrain_bench.errors import ExecutionError

RETRY_S = 0.01


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Sockets of one machine's producers; their names are no files, so nothing is left of them.

    Attributes:
        name: begins their names.
        key: what both ends must know.
        num_producers: how many there are.
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

    def listen(self, producer: int, num_ranks: int) -> Listener:
        """Where a producer waits for its ranks."""
        return Listener(self._address(producer), "AF_UNIX", num_ranks, self.key.encode())

    def connect(self, producer: int, timeout_s: float) -> Connection:
        """A line to a producer, once it listens.

        Raises:
            ExecutionError: if it does not within the time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return Client(self._address(producer), "AF_UNIX", self.key.encode())
            except (ConnectionError, EOFError) as error:
                if time.monotonic() > deadline:
                    raise ExecutionError(
                        f"producer {producer}: not there after harness.timeout_s={timeout_s:g} ({error})"
                    ) from error
            time.sleep(RETRY_S)

    def _address(self, producer: int) -> str:
        return f"\0{self.name}-{producer}"
