"""A folder of safetensors files: which tensors it has, their shapes, and slices of them; nothing is unpickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from entrain_bench.base.errors import UserError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint in Hugging Face's format: a folder, and the file of each tensor, by name."""

    folder: Path
    files: Mapping[str, Path]

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """The checkpoint of a folder, single or by its index; ``UserError`` if there is none, or it is damaged."""
        index = folder / INDEX
        if not index.is_file():
            single = folder / SINGLE
            if not single.is_file():
                raise UserError(f"harness.weights={folder}: has neither {SINGLE} nor {INDEX}")
            try:
                return cls(folder, dict.fromkeys(_opened(single).keys(), single))
            except (SafetensorError, OSError) as error:
                raise UserError(f"harness.weights={folder}: {SINGLE} is damaged ({error})") from error
        try:
            files = {str(name): str(file) for name, file in json.loads(index.read_text())["weight_map"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"harness.weights={folder}: {INDEX} is damaged") from error
        for file in sorted({*files.values()}):
            if Path(file).name != file or not (folder / file).is_file():
                raise UserError(f"harness.weights={folder}: {INDEX} names {file}, which is no file of the folder")
        return cls(folder, {name: folder / file for name, file in files.items()})

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; ``UserError`` for a damaged file, or one without the tensor."""
        return tuple(self._slice(name).get_shape())

    def rows(self, name: str, start: int, stop: int, columns: tuple[int, int] | None = None) -> Tensor:
        """Rows of a tensor, or only some columns of them; no more is read."""
        part = self._slice(name)
        try:
            found: Tensor = part[start:stop] if columns is None else part[start:stop, columns[0] : columns[1]]
        except SafetensorError as error:
            raise self._damaged(name) from error
        return found

    def _slice(self, name: str) -> Any:
        try:
            return _opened(self.files[name]).get_slice(name)
        except (SafetensorError, OSError) as error:
            raise self._damaged(name) from error

    def _damaged(self, name: str) -> UserError:
        return UserError(f"harness.weights={self.folder}: {self.files[name].name} is damaged ({name} cannot be read)")


@cache
def _opened(file: Path) -> Any:
    """An open file, mapped into memory; ``close_files`` forgets it."""
    return safe_open(file, framework="pt")


def close_files() -> None:
    """Close the files that reading has opened."""
    _opened.cache_clear()
