"""Data sets of the Hugging Face hub, streamed by the datasets library, which knows how their files are laid out."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from entrain_bench.base.errors import UserError

from .fields import FieldSource
from .interface import BadRecord, Limits, RawSample, Shard

# Rows that fields are found by.
_HEAD_ROWS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSource(FieldSource):
    """Rows of a data set of the hub; no script of a data set is run (datasets has no such option since 4.0).

    experiments/source/hub.yaml explains the attributes. Without a ``revision`` a scan that goes on notices no change.
    """

    config: str | None = None
    split: str = "train"
    revision: str | None = None

    def shards(self) -> list[Shard]:
        """The data set's own shards; ``UserError`` if it cannot be reached, or lacks a column."""
        opened = self._opened()
        columns = opened.column_names or []
        missing = [name for name in self.fields().names if columns and name not in columns]
        if missing:
            raise UserError(f"source: {self.path} has no column {missing[0]}; columns: {', '.join(columns)}")
        total = opened.num_shards
        taken = self.taken().of(total)
        return [Shard(f"{self.split}-{number:05d}", 0, "", self.path, (number, total)) for number in range(taken)]

    def samples(self, shard: Shard, limits: Limits) -> Iterator[RawSample | BadRecord]:  # noqa: ARG002
        """The rows of a shard."""
        fields = self.fields()
        (number, total) = shard.part
        for row_number, row in enumerate(self._opened().shard(num_shards=total, index=number)):
            yield fields.record(f"row {row_number + 1}", row)

    def head(self) -> tuple[list[str], list[Mapping[str, Any]]]:
        """The names of the columns, and the first rows."""
        rows = list(islice(self._opened(), _HEAD_ROWS))
        return list(rows[0]) if rows else [], rows

    def _opened(self) -> Any:
        """The data set, of which nothing is read yet."""
        try:
            import datasets
        except ImportError as error:
            raise UserError("source=hub: datasets is not installed. Run pip install -e '.[data]'") from error
        # They say the same several times.
        for name in ("datasets", "huggingface_hub"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        try:
            opened = datasets.load_dataset(
                self.path, self.config, split=self.split, revision=self.revision, streaming=True
            )
            # Content as it is, with its name.
            return opened.decode(False)
        # What the network, the hub and a data set's own files raise has no common base.
        except Exception as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise UserError(f"source.path={self.path}: cannot be opened ({reason})") from error
