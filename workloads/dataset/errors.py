"""Why a sample cannot be in a trace."""

from enum import StrEnum
from functools import partial


class Reason(StrEnum):
    """Why a sample is left out."""

    CHANGED = "it has changed since the scan"
    DECODE = "it cannot be decoded"
    DUPLICATE = "two members of one name"
    EMPTY = "neither text nor media"
    FILE = "the file cannot be read on"
    FORMAT = "no known format"
    HEADER = "its header cannot be read"
    LIMIT = "beyond a limit"
    MISSING = "a file that does not exist"
    OUTSIDE = "a path that leaves the data's root"
    RECORD = "no valid record"
    THIN = "sides beyond the largest ratio"
    URL = "a URL, whose file must be downloaded first"


class BadSampleError(ValueError):
    """A sample that cannot be in a trace: the general reason, and this sample's problem."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason


# The error of a sample that would take more memory than the budget allows.
over_budget = partial(BadSampleError, Reason.LIMIT)


def one_line(error: Exception) -> str:
    """Return a short text of an error."""
    return " ".join(str(error).split())[:120] or type(error).__name__
