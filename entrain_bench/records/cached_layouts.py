"""Planned layouts that runs share if they look alike to a planner, since planning takes most of a run's time.

They are JSON: YAML of 16,384 ranks takes 0.7 s to read, JSON 2 ms (x86-64, 2026-11).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from entrain_bench.base.files import write_atomically
from entrain_bench.program.layout import Layout, layout_from_json, layout_to_json
from entrain_bench.records.environment import made_by
from entrain_bench.records.metrics import check_numbers
from entrain_bench.records.sealed import log_warning, sealed, unsealed


@dataclass(frozen=True, slots=True)
class CachedLayout:
    """A planned layout and the seconds that planning took, when it was done."""

    layout: Layout
    planning_time_s: float


@dataclass(frozen=True, slots=True)
class CachedLayouts:
    """The folder ``plans/<key>.json`` of a results folder; one that cannot be read or written only costs time."""

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
