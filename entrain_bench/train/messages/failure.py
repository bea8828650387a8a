"""An exception as values: it ended one process of a run, and is raised in another."""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass
from typing import Self

from entrain_bench.base.errors import DeadlockError, ExecutionError, IncompatibleError, OutOfMemoryError, UserError

# Errors that say everything in their line; others are of the process they happened on.
_KNOWN = {
    kind.__name__: kind for kind in (UserError, IncompatibleError, DeadlockError, OutOfMemoryError, ExecutionError)
}


class WaitError(ExecutionError):
    """A rank waited too long for another one; ``waited_s`` says for how many seconds."""

    def __init__(self, text: str, waited_s: float) -> None:
        super().__init__(text)
        self.waited_s = waited_s


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of a process, ``who``, at a time since the epoch.

    ``kind`` is empty for classes of other packages; ``waited_s`` is 0 unless the process waited for another.
    """

    who: str
    time_s: float
    kind: str
    text: str
    trace: str
    waited_s: float = 0.0

    @classmethod
    def of(cls, error: Exception, who: str) -> Self:
        """Return the exception that is being handled."""
        waited_s = error.waited_s if isinstance(error, WaitError) else 0.0
        name = ExecutionError.__name__ if waited_s else type(error).__name__
        kind = name if waited_s or type(error) in _KNOWN.values() else ""
        line = " ".join(str(error).split())
        text = line if kind else f"{name}: {line}"
        return cls(who, time.time(), kind, text, traceback.format_exc(), waited_s)

    def as_error(self) -> Exception:
        """Return the exception for the process that waits."""
        error = _KNOWN[self.kind](self.text) if self.kind else ExecutionError(f"{self.who}: {self.text}")
        error.__cause__ = ExecutionError(f"traceback of {self.who}:\n{self.trace}")
        return error
