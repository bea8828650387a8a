"""JSON files with the key that they belong to and the SHA-256 of their content; planned layouts, which are such files.

The hash shows accidents and edits; it is no signature. ``entrain-bench verify`` computes results again.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entrain_bench.base.files import write_atomically
from entrain_bench.program.layout import Layout, layout_from_json, layout_to_json
from entrain_bench.records.code import made_by
from entrain_bench.records.metrics import check_numbers

logger = logging.getLogger(__name__)

SEAL = "sha256"


def sealed(key: str, values: Mapping[str, Any]) -> bytes:
    """The file of a key."""
    content = {**values, "key": key}
    return json.dumps({**content, SEAL: _hash_of(content)}, indent=1, sort_keys=True).encode()


def unsealed(content: bytes, key: str) -> dict[str, Any]:
    """The values in the file of a key; ``ValueError`` if it is none, was changed, or belongs to another key."""
    values = json.loads(content)
    if not isinstance(values, dict) or not isinstance(seal := values.pop(SEAL, None), str):
        raise ValueError("it has no hash of its content")
    if values.get("key") != key:
        raise ValueError(f"it belongs to key {values.get('key')}")
    if seal != _hash_of(values):
        raise ValueError("its content is not that of its hash")
    return values


def log_warning(path: Path, reason: str) -> None:
    """Warn of an invalid file."""
    logger.warning("%s: %s", path, reason)


def say_nothing(_: Path, __: str) -> None:
    """Do not warn."""


def _hash_of(values: Mapping[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class CachedLayout:
    """A planned layout and the seconds that planning took, when it was done."""

    layout: Layout
    planning_time_s: float


@dataclass(frozen=True, slots=True)
class CachedLayouts:
    """The folder ``plans/<key>.json``: runs that are equal for a planner share a layout. It only saves time."""

    root: Path
    warn: Callable[[Path, str], None] = log_warning

    def read(self, key: str) -> CachedLayout | None:
        """The plan of a key; None if there is none."""
        path = self._path(key)
        try:
            values = unsealed(path.read_bytes(), key)
            check_numbers({"planning_time_s": values["planning_time_s"]})
            return CachedLayout(layout_from_json(values["layout"]), float(values["planning_time_s"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.warn(path, f"not used ({' '.join(str(error).split())}); the layout is planned again")
            return None

    def write(self, key: str, plan: CachedLayout) -> None:
        """Keep a plan."""
        values = {"layout": layout_to_json(plan.layout), "planning_time_s": plan.planning_time_s, **made_by()}
        with suppress(OSError):
            write_atomically(self._path(key), sealed(key, values))

    def _path(self, key: str) -> Path:
        return self.root / "plans" / f"{key}.json"
