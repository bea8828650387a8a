"""Errors of users, with their wording, and errors of runs with valid input."""

import errno
import sysconfig
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from traceback import walk_tb

MAX_SHOWN = 60
# Names that an error suggests in place of an unknown one.
MAX_SIMILAR = 3
# Set to anything, errors come with their traceback.
TRACEBACK_VARIABLE = "ENTRAIN_BENCH_TRACEBACK"
OWN_PACKAGES = frozenset({"entrain_bench", "entrain_bench_strategies", "entrain_bench_workloads"})
BASE_FOLDER = sysconfig.get_paths()["stdlib"]
# Errors of a disk or a folder that takes no files.
UNWRITABLE = frozenset({errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.EPERM, errno.EROFS})


class UserError(ValueError):
    """Invalid input, as one line that names field, value and allowed range. Ends a run with exit code 2."""


class IncompatibleError(UserError):
    """Incompatible configuration choices. A sweep records such a run as skipped."""


class UnwritableError(UserError):
    """A results folder that cannot be written. It ends a sweep, because no later run could leave a record."""


class DeadlockError(UserError):
    """The order of a program's actions contradicts their dependencies."""


class OutOfMemoryError(UserError):
    """A program needs more device memory than the budget allows."""


class ExecutionError(RuntimeError):
    """A run that failed with valid input: a rank died, or training diverged. Ends it with exit code 1."""


def require(condition: bool, field: str, value: object, allowed: str) -> None:
    """Raise ``UserError`` "field=value: allowed" unless the condition holds."""
    if not condition:
        raise UserError(f"{field}={_shown(value)}: must be {allowed}")


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text)} characters)"


def is_unwritable(error: Exception) -> bool:
    """Whether an error says that a file cannot be written (no space, no permission), or read."""
    return isinstance(error, OSError) and error.errno in UNWRITABLE


def explain(error: Exception) -> str:
    """Return one line on an error that invalid input did not cause; for an outside part with file and line."""
    if is_unwritable(error):
        return str(error)
    what = f"{type(error).__name__}: {' '.join(str(error).split())}"
    place = _outside_place(error)
    return f"{place}: {what}" if place else f"internal error: {what}"


def _outside_place(error: Exception) -> str:
    """File, line and function of the innermost call that this suite made to code neither its own nor installed."""
    place = ""
    ours = False
    for frame, line in walk_tb(error.__traceback__):
        top = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        code = frame.f_code
        ours = ours or top in OWN_PACKAGES
        installed = "site-packages" in code.co_filename or code.co_filename.startswith(("<", BASE_FOLDER))
        if ours and top not in OWN_PACKAGES and not installed:
            place = f"{code.co_filename}:{line} in {code.co_name}"
    return place


def unknown_choice(field: str, value: str, choices: Iterable[str], hint: str = "") -> UserError:
    """The error for a name that is not among the choices: those meant perhaps, then the hint, or else all choices."""
    names = sorted(choices)
    near = similar(value, names)
    meant = f" (did you mean {either(near)}?)" if near else ""
    rest = f". {hint}" if hint else f"; choices: {', '.join(names) or 'none'}"
    return UserError(f"{field}={_shown(value)}: unknown{meant}{rest}")


def no_runs(results_dir: object) -> UserError:
    """The error for a folder of results that holds no run, or none with a result."""
    return UserError(
        f"results_dir={results_dir}: holds no run with a result. Run some first: entrain-bench strategy=megatron "
        f"results_dir={results_dir}"
    )


def unknown_key(text: str, keys: Iterable[str], hint: str = "") -> UserError:
    """The error for an override of a key that does not exist; suggests the hint, or else the nearest key."""
    names = sorted(keys)
    name, given, value = text.lstrip("+~").partition("=")
    near = hint or "".join(similar(name, names, 1))
    meant = f" (did you mean {near}{given}{_shown(value)}?)" if near else ""
    return UserError(f"{_shown(text)}: unknown key{meant}; choices: {', '.join(names) or 'none'}")


def similar(name: str, names: Iterable[str], num: int = MAX_SIMILAR) -> list[str]:
    """Return at most ``num`` names that are spelled like ``name`` or start with it, the nearest first."""
    lowered = {each.lower(): each for each in names}
    wanted = name.lower()
    near = get_close_matches(wanted, lowered, n=num)
    near += [each for each in lowered if wanted and each.startswith(wanted) and each not in near]
    return [lowered[each] for each in near[:num]]


def either(names: Sequence[str]) -> str:
    """Return ``a``, ``a or b``, or ``a, b or c``."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
