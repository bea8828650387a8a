"""Planned runs of sweeps in ``sweeps/<key>.json``, so that a lost record is noticed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from entrain_bench.base.files import write_atomically
from entrain_bench.records.code import made_by
from entrain_bench.records.records import Results
from entrain_bench.records.sealed import sealed, unsealed

FOLDER = "sweeps"
KEY_LETTERS = 16


@dataclass(frozen=True, slots=True)
class PlannedSweep:
    """A sweep's name, overrides of each cell that it came to by key, and those of cells that it did not come to."""

    name: str
    cells: Mapping[str, str]
    unbegun: Sequence[str] = ()

    def lost(self, results: Results) -> list[str]:
        """The cells without a record, by their overrides."""
        return [text for key, text in self.cells.items() if results.read(key) is None] + [*self.unbegun]

    def write(self, results: Results) -> None:
        """Replace what an earlier attempt at the sweep left; where that cannot be, the cells are not known later."""
        texts = sorted([*self.cells.values(), *self.unbegun])
        key = hashlib.sha256(json.dumps([self.name, texts]).encode()).hexdigest()[:KEY_LETTERS]
        values = {"name": self.name, "cells": self.cells, "unbegun": [*self.unbegun], **made_by()}
        with suppress(OSError):
            write_atomically(results.root / FOLDER / f"{key}.json", sealed(key, values))


def read_sweeps(results: Results) -> Iterator[tuple[Path, PlannedSweep | None]]:
    """The sweeps of a folder by their files; None for a file that may not be believed."""
    for path in sorted((results.root / FOLDER).glob("*.json")):
        found = None
        with suppress(OSError, ValueError, KeyError, TypeError):
            values = unsealed(path.read_bytes(), path.stem)
            found = PlannedSweep(str(values["name"]), {**values["cells"]}, [*values["unbegun"]])
        yield path, found


def lost_runs(results: Results, shown: Collection[str]) -> list[str]:
    """Runs without a record of the sweeps that runs with these keys are of, by their overrides."""
    sweeps = [sweep for _, sweep in read_sweeps(results) if sweep and not sweep.cells.keys().isdisjoint(shown)]
    return [*dict.fromkeys(text for sweep in sweeps for text in sweep.lost(results))]
