"""Data sets of the Hugging Face hub, and folders in any of its layouts, streamed by the datasets library.

Among the layouts are arrow, csv, imagefolder and audiofolder.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from entrain_bench.base.errors import UserError

from ..take import Take
from .fields import Fields, FieldSource, Row
from .files import data_files
from .interface import Limits, Shard, one_line

# Rows that fields are found by.
_HEAD_ROWS = 32


@dataclass(frozen=True, kw_only=True)
class HubSource(FieldSource):
    """Rows of a data set (experiments/source/hub.yaml); datasets 4 and later run no script of a data set.

    Without a ``revision``, a resumed scan of the hub notices no change.
    """

    config: str | None = None
    split: str = "train"
    revision: str | None = None

    def fields_at(self, place: str = "") -> Fields:
        """Return the columns that are read; of a folder, media are files in it."""
        folder = os.path.realpath(self.path) if Path(self.path).is_dir() else ""
        return replace(super().fields_at(place), root=folder)

    def shards(self) -> list[Shard]:
        """Return the data set's shards; ``UserError`` if it cannot be read, or lacks a column."""
        opened = self._opened()
        if opened.column_names:
            self.check_columns(opened.column_names, self.path)
        total = opened.num_shards
        taken = Take.parse(self.take, "source.take").of(total)
        version = _version(self.fields_at().root)
        return [Shard(f"{self.split}-{number:05d}", 0, version, self.path, (number, total)) for number in range(taken)]

    def rows(self, shard: Shard, limits: Limits) -> Iterator[tuple[str, Row]]:  # noqa: ARG002
        """Read the rows of a shard."""
        number, total = shard.part
        for row_number, row in enumerate(self._opened().shard(num_shards=total, index=number)):
            yield f"row {row_number + 1}", row

    def head(self) -> tuple[list[str], list[Row]]:
        """Return the names of the columns, and the first rows."""
        rows = list(islice(self._opened(), _HEAD_ROWS))
        return list(rows[0]) if rows else [], rows

    def _opened(self) -> Any:
        """Return the data set, of which nothing is read yet."""
        try:
            import datasets
        except ImportError as error:
            raise UserError("source=hub: datasets is not installed. Run pip install -e '.[data]'") from error
        # They say the same several times.
        for name in ("datasets", "huggingface_hub"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        path = self.fields_at().root or self.path
        try:
            opened = datasets.load_dataset(path, self.config, split=self.split, revision=self.revision, streaming=True)
            return opened.decode(False) if opened.features else opened
        # What the network, the hub and a data set's own files raise has no common base.
        except Exception as error:
            raise UserError(f"source.path={self.path}: cannot be opened ({one_line(error)})") from error


def _version(folder: str) -> str:
    """Return a hash of the names, sizes and times of a folder's files; empty for no folder."""
    if not folder:
        return ""
    files = [f"{file.label} {file.version}" for file in data_files(folder, ("",), Take())]
    return hashlib.sha256("\n".join(files).encode()).hexdigest()[:16]
