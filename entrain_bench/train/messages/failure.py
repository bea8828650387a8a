"""An exception as values: it ended one process of a run, or what that was to make, and is raised in another."""

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


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of a process, ``who``, at a time since the epoch; ``kind`` is empty for a class of others."""

    who: str
    time_s: float
    kind: str
    text: str
    trace: str

    @classmethod
    def of(cls, error: Exception, who: str) -> Self:
        """The exception that is being handled."""
        kind = type(error).__name__ if type(error) in _KNOWN.values() else ""
        line = " ".join(str(error).split())
        text = line if kind else f"{type(error).__name__}: {line}"
        return cls(who, time.time(), kind, text, traceback.format_exc())

    def as_error(self) -> Exception:
        """The exception for whoever waits."""
        error = _KNOWN[self.kind](self.text) if self.kind else ExecutionError(f"{self.who}: {self.text}")
        error.__cause__ = ExecutionError(f"traceback of {self.who}:\n{self.trace}")
        return error
