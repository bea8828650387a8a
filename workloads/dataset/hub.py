"""Data sets of the Hugging Face hub, streamed by the datasets library, which knows how their files are laid out."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from entrain_bench.base.errors import UserError

from ..take import ALL, Take
from .fields import Fields
from .interface import BadRecord, BadSampleError, Limits, RawSample, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSource:
    """Rows of a data set of the hub; no script of a data set is run (datasets has no such option since 4.0).

    Attributes:
        path: name of the data set, such as ``HuggingFaceM4/FineVision``, or a folder laid out like one.
        config: its configuration; null: the only one.
        split: of the data set.
        revision: commit or tag; null: the newest, whose change is not noticed by a scan that goes on.
        text: as of ``ParquetSource``; so are the others.
        images: column of images.
        audio: column of sounds.
        video: column of videos.
        seconds: column with the length of audio or video.
        take: which of the shards.
    """

    path: str
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    text: Sequence[str] | str = ()
    images: str | None = None
    audio: str | None = None
    video: str | None = None
    seconds: str | None = None
    take: str = ALL

    def __post_init__(self) -> None:
        self._fields()
        Take.parse(self.take, "source.take")

    def shards(self) -> list[Shard]:
        """The data set's own shards.

        Raises:
            UserError: for a data set that cannot be reached, and columns that it does not have.
        """
        opened = self._opened()
        columns = opened.column_names or []
        missing = [name for name in self._fields().names if columns and name not in columns]
        if missing:
            raise UserError(f"source: {self.path} has no column {missing[0]}; columns: {', '.join(columns)}")
        total = opened.num_shards
        taken = Take.parse(self.take, "source.take").of(total)
        return [Shard(f"{self.split}-{number:05d}", 0, "", self.path, (number, total)) for number in range(taken)]

    def samples(self, shard: Shard, limits: Limits) -> Iterator[RawSample | BadRecord]:  # noqa: ARG002
        """The rows of a shard."""
        fields, (number, total) = self._fields(), shard.part
        for row_number, row in enumerate(self._opened().shard(num_shards=total, index=number)):
            key = f"row {row_number + 1}"
            try:
                yield fields.sample(key, row)
            except BadSampleError as error:
                yield BadRecord(key, error)

    def _fields(self) -> Fields:
        return Fields.of(self.text, self.images, self.audio, self.video, self.seconds, "")

    def _opened(self) -> Any:
        """The data set, of which nothing is read yet."""
        try:
            import datasets
        except ImportError as error:
            raise UserError("source=hub: datasets is not installed; pip install -e '.[data]' adds it") from error
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
