"""The interface of raw data: shards of rows, and samples of rows."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from entrain_bench.base.errors import require
from entrain_bench.specs.parse import Allowed

from ..columns import ALL, MAX_PIXELS, MAX_SECONDS, Take
from .conventions import Chosen, table_of
from .errors import BadSampleError, Reason
from .fields import RawSample, Row, sample_of

type Rows = Iterator[Row | list[Any] | BadSampleError]


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


@dataclass(frozen=True, kw_only=True)
class Source(Chosen, ABC):
    """Raw data in shards of rows; travels between processes. experiments/source/files.yaml explains the fields.

    An image, sound or video is content, a file's name, both (Hugging Face), or width and height.
    """

    path: str
    take: Take = ALL

    def __post_init__(self) -> None:
        super().__post_init__()
        any_field = any((self.text, self.images, self.audio, self.video))
        require(any_field, "source", "no fields", "at least one of text, images, audio, video")
        table_of(self.conventions)

    @abstractmethod
    def shards(self) -> list[Shard]:
        """Return all shards, always in the same order; ``UserError`` for missing data."""

    @abstractmethod
    def rows(self, shard: Shard, limits: Limits) -> Rows:
        """Read the rows of a shard; after an exception, earlier rows are kept."""

    def folder(self, shard: Shard) -> str:  # noqa: ARG002
        """Return the folder of the files that rows name; empty: they may name none."""
        return ""

    def sample(self, row: Row | list[Any] | BadSampleError, folder: str, content: bool = False) -> RawSample:
        """Return the sample of a row, with ``content`` also where it states sizes; ``BadSampleError`` for a bad row."""
        if isinstance(row, BadSampleError):
            raise row
        return sample_of(row, self, folder, content)
