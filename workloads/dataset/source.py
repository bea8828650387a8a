"""Shards of raw data, limits of samples, and why a sample cannot be in a trace."""

from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Annotated

from entrain_bench.specs.parse import Allowed

from ..columns import MAX_PIXELS, MAX_SECONDS


class Reason(StrEnum):
    """Why a sample is left out."""

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


@dataclass(frozen=True, slots=True)
class Shard:
    """A file, or a part of one that is scanned in one go; its samples are called ``label:number``."""

    label: str
    # Changes when the file does.
    version: str
    place: str
    # Number of the first sample, and start and end of the part in units of the source.
    first: int = 0
    part: tuple[int, ...] = ()


def _most(high: float) -> Allowed:
    return Allowed(lambda value: 0 < value <= high, f"above 0, at most {high:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Upper limits of a sample (experiments/trace.yaml), checked on headers before decoding."""

    side_pixels: Annotated[int, _most(MAX_PIXELS)] = 100_000
    image_pixels: Annotated[int, _most(MAX_PIXELS**2)] = 1_000_000_000
    file_bytes: Annotated[int, _most(2.0**30)] = 256 * 2**20
    media: Annotated[int, _most(2.0**20)] = 4096
    text_chars: Annotated[int, _most(2.0**28)] = 16 * 2**20
    seconds: Annotated[float, _most(MAX_SECONDS)] = MAX_SECONDS

    def check(self, limit: str, value: float, what: str) -> None:
        """Raise ``BadSampleError`` for a value beyond a limit; ``what`` names the value."""
        if value > getattr(self, limit):
            raise BadSampleError(Reason.LIMIT, f"{what}, limits.{limit}={getattr(self, limit):.10g}")
