"""Errors: those that are the user's to fix, and how to phrase them; and runs that failed by themselves."""

from collections.abc import Iterable
from difflib import get_close_matches

# Set to anything, errors come with their traceback.
TRACEBACK_VARIABLE = "ENTRAIN_BENCH_TRACEBACK"


class UserError(ValueError):
    """Bad input: one line that names the field, the value and what is allowed. Ends a run with exit code 2."""


class IncompatibleError(UserError):
    """Parts that do not fit together; a sweep skips such a cell."""


class DeadlockError(UserError):
    """The order of a program's actions contradicts their dependencies."""


class OutOfMemoryError(UserError):
    """A program needs more device memory than the budget allows."""


class ExecutionError(RuntimeError):
    """A run that failed though its input was good: a rank died, or training diverged. Ends it with exit code 1."""


def require(condition: bool, field: str, value: object, allowed: str) -> None:
    """Raise ``UserError`` "field=value: allowed" unless the condition holds."""
    if not condition:
        raise UserError(f"{field}={value}: must be {allowed}")


def internal(error: Exception) -> str:
    """One line on an error that is nobody's input."""
    return f"internal error: {type(error).__name__}: {' '.join(str(error).split())}"


def unknown_choice(field: str, value: str, choices: Iterable[str]) -> UserError:
    """The error for a name that is not among the choices; suggests the nearest one."""
    names = sorted(choices)
    near = get_close_matches(value, names, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return UserError(f"{field}={value}: unknown{hint}; choices: {', '.join(names) or 'none'}")
