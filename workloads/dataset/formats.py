"""Sources of rows: local files in any known format, and datasets of the Hugging Face hub."""

import glob
import hashlib
import logging
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from entrain_bench.base.errors import UserError, require

from ..columns import ALL, Take, num_taken
from . import members, readers
from .conventions import Chosen, table_of
from .fields import RawSample, Row, sample_of
from .readers import COMPRESSED, Index, Rows
from .source import BadSampleError, Limits, Shard, one_line

# Rows of a shard; a row group is never cut.
_SHARD_ROWS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Format:
    """Files with some endings; ``index``: where reading may start, None: at the start only."""

    name: str
    endings: Sequence[str]
    rows: Callable[[Shard, Chosen, Limits], Rows]
    index: Callable[[Shard], Index | None] = lambda _: None
    # Names of files that are read with them.
    also: Sequence[str] = ()


def _packed(*endings: str) -> list[str]:
    return [ending + packed for ending in endings for packed in ("", *COMPRESSED)]


FOLDER = Format("media", [f".{ending}" for ending in table_of(None).endings], members.folder_rows, members.folder_index)
_TAR = [".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz"]
# A folder is read by the first format of which it has files.
FORMATS = (
    Format("parquet", [".parquet"], readers.parquet_rows, readers.parquet_index),
    Format("arrow", [".arrow"], readers.arrow_rows),
    Format("webdataset", _TAR, members.tar_rows),
    Format("json", _packed(".json", ".jsonl", ".ndjson"), readers.json_rows, readers.json_index),
    Format("table", _packed(".csv", ".tsv"), readers.table_rows),
    Format("kaldi", [members.KALDI[0]], members.kaldi_rows, also=members.KALDI),
    FOLDER,
)


def _format_of(file: Path) -> Format | None:
    """Return the format of a file by its ending; that of a folder is its media's."""
    if file.is_dir():
        return FOLDER
    return next((one for one in FORMATS if file.name.lower().endswith(tuple(one.endings))), None)


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
    def folder(self, shard: Shard) -> str:
        """Return the folder of the files that rows name; empty: they may name none."""

    @abstractmethod
    def shards(self) -> list[Shard]:
        """Return all shards, always in the same order; ``UserError`` for missing data."""

    @abstractmethod
    def rows(self, shard: Shard, limits: Limits) -> Rows:
        """Read the rows of a shard; after an exception, earlier rows are kept."""

    def sample(self, row: Row | list[Any] | BadSampleError, folder: str) -> RawSample:
        """Return the sample of a row; ``BadSampleError`` for a bad row."""
        if isinstance(row, BadSampleError):
            raise row
        return sample_of(row, self, folder)


@dataclass(frozen=True, kw_only=True)
class FileSource(Source):
    """Local files of any format above; names in rows are those of files below ``root``, or the file's own folder."""

    root: str = ""
    format: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [one.name for one in FORMATS]
        require(self.format in (None, *names), "source.format", self.format, f"{', '.join(names)}, or null")

    def folder(self, shard: Shard) -> str:
        """Return the folder of the files that rows name."""
        return self.root or str(Path(shard.place).parent)

    def files(self) -> list[Shard]:
        """Return the files that are taken, all of the first format that there is; ``UserError`` if there are none."""
        place = Path(self.path).expanduser()
        found = [(name, _format_of(name)) for name in _names(place)]
        allowed = [one for one in FORMATS if self.format in (None, one.name)]
        kind = next((one for one in allowed if any(one is each for _, each in found)), None)
        if kind is None:
            endings = ", ".join(ending for one in allowed for ending in one.endings)
            problem = "has no" if place.is_dir() else "must be"
            what = f"{problem} {endings} files" if found or place.is_dir() else "does not exist"
            raise UserError(f"source.path={self.path}: {what}")
        files = [name for name, each in found if each is kind]
        if kind is FOLDER:
            files = sorted({file.parent for file in files})
        # Labels are paths below the folder that all files have in common.
        base = place if place.is_dir() else Path(os.path.commonpath([file.parent for file in files]))
        taken = files[: num_taken(self.take, len(files))]
        return [Shard(file.relative_to(base).as_posix(), _version(file), str(file)) for file in taken]

    def unread(self) -> Mapping[str, int]:
        """Return endings of files next to those that are read, and how many; those of media may be named by rows."""
        taken = {_format_of(Path(file.place)) for file in self.files()}
        also = {name for kind in taken if kind for name in kind.also}
        others = [name for name in _names(Path(self.path).expanduser()) if _format_of(name) not in (FOLDER, *taken)]
        named = [name for name in others if name.suffix != ".md" and name.name not in also]
        return dict(Counter(name.suffix or name.name for name in named))

    def shards(self) -> list[Shard]:
        """Return parts of files; ``UserError`` for no files, an array that is no JSON, and a record too long."""
        shards = list[Shard]()
        for file in self.files():
            kind = _format_of(Path(file.place))
            index = kind.index(file) if kind else None
            if index is None:
                shards.append(file)
                continue
            _, numbers = index
            starts = np.unique(numbers[:-1] // _SHARD_ROWS, return_index=True)[1].tolist()
            shards += [_part(file, index, *part) for part in pairwise([*starts, len(numbers) - 1])]
        return shards

    def rows(self, shard: Shard, limits: Limits) -> Rows:
        """Read the rows of a shard."""
        kind = _format_of(Path(shard.place))
        return kind.rows(shard, self, limits) if kind else iter(())


def _part(file: Shard, index: Index, start: int, stop: int) -> Shard:
    """Return the part of a file between two entries of its index."""
    places, numbers = index
    return replace(file, first=int(numbers[start]), part=(int(places[start]), int(places[stop])))


def _names(place: Path) -> list[Path]:
    """Return the files of a path: one, all in a folder, or those of a pattern."""
    if place.is_file():
        return [place]
    pattern = glob.escape(str(place)) + "/**/*" if place.is_dir() else str(place)
    return [file for name in sorted(glob.iglob(pattern, recursive=True)) if (file := Path(name)).is_file()]  # noqa: PTH207


def _version(place: Path) -> str:
    """Return bytes and last change of a file; of a folder bytes, and a hash of names, sizes and times below it."""
    if place.is_file():
        return f"{place.stat().st_size}-{place.stat().st_mtime_ns}"
    files = [(str(file), file.stat()) for file in _names(place)]
    states = "\n".join(f"{name} {state.st_size} {state.st_mtime_ns}" for name, state in files)
    return f"{sum(state.st_size for _, state in files)}-{hashlib.sha256(states.encode()).hexdigest()[:16]}"


@dataclass(frozen=True, kw_only=True)
class HubSource(Source):
    """Rows of a dataset of the Hugging Face hub or a folder in one of its layouts, streamed without its scripts.

    Without a ``revision``, a resumed scan of the hub notices no change.
    """

    config: str | None = None
    split: str = "train"
    revision: str | None = None

    def folder(self, shard: Shard | None = None) -> str:  # noqa: ARG002
        """Return the folder of the dataset, whose files rows may name; empty for one of the hub."""
        return os.path.realpath(self.path) if Path(self.path).is_dir() else ""

    def shards(self) -> list[Shard]:
        """Return the dataset's shards; ``UserError`` if it cannot be read."""
        folder = self.folder()
        version = _version(Path(folder)) if folder else ""
        total = self._opened().num_shards
        taken = range(num_taken(self.take, total))
        return [Shard(f"{self.split}-{number:05d}", version, self.path, 0, (number, total)) for number in taken]

    def rows(self, shard: Shard, limits: Limits) -> Rows:  # noqa: ARG002
        """Read the rows of a shard."""
        number, total = shard.part
        yield from self._opened().shard(num_shards=total, index=number)

    def _opened(self) -> Any:
        """Return the dataset, of which nothing is read yet."""
        try:
            import datasets
        except ImportError as error:
            raise UserError("source=hub: datasets is not installed. Run pip install -e '.[data]'") from error
        # They say the same several times.
        for name in ("datasets", "huggingface_hub"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        path = self.folder() or self.path
        try:
            opened = datasets.load_dataset(path, self.config, split=self.split, revision=self.revision, streaming=True)
            return opened.decode(False) if opened.features else opened
        # Errors of the network, the hub and a dataset's own files have no common base.
        except Exception as error:
            raise UserError(f"source.path={self.path}: cannot be opened ({one_line(error)})") from error
