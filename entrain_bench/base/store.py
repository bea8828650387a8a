"""Small stores that processes share, in the user's cache folder: plain values by key."""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from entrain_bench.base.files import remove_partial, write_atomically

MAX_VERSIONS = 8


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/entrain-bench``, or ``~/.cache/entrain-bench``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "entrain-bench"


class Store:
    """Values by key, of a version; a store that cannot be read or written only costs time."""

    def __init__(self, name: str, version: str) -> None:
        self._name = name
        self._path = cache_folder() / f"{name}-{version}.json"
        self._values: dict[str, Any] = {}
        self._changed = False
        with suppress(OSError, ValueError):
            self._values = dict(json.loads(self._path.read_text()))
            os.utime(self._path)

    def get(self, key: Sequence[str]) -> Any:
        """The value of a key, None if there is none."""
        return self._values.get(json.dumps(list(key)))

    def put(self, key: Sequence[str], value: Any) -> None:
        """Keep a value that JSON can hold."""
        self._values[json.dumps(list(key))] = value
        self._changed = True

    def save(self) -> None:
        """Write the new values, and keep those that other processes wrote in the meantime."""
        if not self._changed:
            return
        with suppress(OSError, ValueError):
            others = dict(json.loads(self._path.read_text())) if self._path.exists() else {}
            write_atomically(self._path, json.dumps(others | self._values).encode())
            files = sorted(self._path.parent.glob(f"{self._name}-*.json"), key=lambda file: file.stat().st_mtime)
            for old in files[:-MAX_VERSIONS]:
                old.unlink(missing_ok=True)
            remove_partial(self._path.parent)
        self._changed = False
