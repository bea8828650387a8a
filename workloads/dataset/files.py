"""The files of a source: by a path, a folder or a pattern."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from entrain_bench.base.errors import UserError

from ..take import Take


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file of a source; its ``label`` is its path below the folder that all files have in common."""

    path: Path
    label: str

    @property
    def version(self) -> str:
        """Size and time of the last change."""
        found = self.path.stat()
        return f"{found.st_size}-{found.st_mtime_ns}"


def data_files(path: str, suffixes: Sequence[str], take: Take) -> list[DataFile]:
    """Files with a suffix, by name: a file, all below a folder, or a pattern; ``UserError`` if there are none."""
    place = Path(path).expanduser()
    if place.is_file():
        return [DataFile(place, place.name)]
    pattern = glob.escape(str(place)) + "/**/*" if place.is_dir() else str(place)
    found = sorted(Path(name) for name in glob.iglob(pattern, recursive=True))  # noqa: PTH207
    files = [file for file in found if file.name.endswith(tuple(suffixes)) and file.is_file()]
    if not files:
        what = "has no" if place.is_dir() else "does not exist. Must be a folder, a file or a pattern of"
        raise UserError(f"source.path={path}: {what} {' or '.join(suffixes)} files")
    base = place if place.is_dir() else _common(files)
    return [DataFile(file, file.relative_to(base).as_posix()) for file in files[: take.of(len(files))]]


def _common(files: Sequence[Path]) -> Path:
    base = files[0].parent
    while not all(file.is_relative_to(base) for file in files):
        base = base.parent
    return base
