"""Hashes of an output's inputs and files; an output without changes is not written again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from entrain_bench.base.errors import UserError
from entrain_bench.base.files import write_atomically
from entrain_bench.records.cells import Cell
from entrain_bench.records.code import hash_of, sources_of
from entrain_bench.records.records import Results


@dataclass(frozen=True, slots=True)
class Stamp:
    """Hash of an output's inputs, and of its files by their paths, kept in ``stamps/<name>.json``."""

    inputs: str
    files: dict[str, str]

    @classmethod
    def of(cls, inputs: str, files: Iterable[str], root: Path) -> Stamp:
        """The stamp of files as they are now; a file that is not there has no hash."""
        return cls(inputs, {file: _hash_of_file(root / file) for file in files})


def read_stamp(results: Results, name: str) -> Stamp | None:
    """The stamp of an output; None if there is none."""
    with suppress(OSError, ValueError, TypeError):
        return Stamp(**json.loads(_path(results, name).read_text()))
    return None


def write_stamp(results: Results, name: str, stamp: Stamp) -> None:
    """Leave a stamp; where it cannot be, the output is written again next time."""
    with suppress(OSError):
        write_atomically(_path(results, name), json.dumps(asdict(stamp), indent=1).encode())


def hash_of_inputs(
    modules: Collection[str],
    details: Sequence[str],
    sweeps: Iterable[Sequence[Cell]],
    shown: Iterable[Cell],
    results: Results,
) -> str:
    """Hash of what an output depends on; empty if its code cannot be found.

    Args:
        modules: whose code writes it.
        details: texts that it depends on.
        sweeps: the cells that it reads, sweep by sweep.
        shown: those of them whose timelines it reads.
        results: their records.
    """
    try:
        sources = sources_of(modules)
    except UserError:
        return ""
    if not sources.keys() >= {*modules}:
        return ""
    digest = hashlib.sha256(json.dumps([hash_of(sources), *details]).encode())
    for file in templates_of(sources):
        digest.update(file.read_bytes())
    for cells in sweeps:
        digest.update(b"\0")
        for cell in cells:
            digest.update(f"{cell.key} {results.digest(cell.key)} {' '.join(cell.overrides)}\n".encode())
    for cell in shown:
        record = results.read(cell.key)
        has = record is not None and results.has_timeline(record)
        digest.update(f"{cell.key} {record.timeline_sha256 if record and has else ''}\n".encode())
    return digest.hexdigest()[:16]


def templates_of(modules: Iterable[str]) -> list[Path]:
    """Return the files in folders ``templates`` next to some modules."""
    root = Path(__file__).parents[2]
    folders = {root.joinpath(*module.split(".")[:-1], "templates") for module in modules}
    return [file for folder in sorted(folders) for file in sorted(folder.glob("*"))]


def _path(results: Results, name: str) -> Path:
    return results.root / "stamps" / f"{name}.json"


def _hash_of_file(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return ""
