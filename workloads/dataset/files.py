"""Files of a source, and files that records name."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from entrain_bench.base.errors import UserError

from ..take import Take
from .interface import BadSampleError, Reason


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of a source.

    Attributes:
        path: where it is.
        label: its path below the folder that all files have in common.
        version: its size and the time of its last change.
    """

    path: Path
    label: str
    version: str


def data_files(path: str, suffixes: Sequence[str], take: Take) -> list[DataFile]:
    """Find files by name: one file, all in a folder, or a pattern; ``UserError`` if there are none."""
    place = Path(path).expanduser()
    pattern = glob.escape(str(place)) + "/**/*" if place.is_dir() else str(place)
    found = sorted(Path(name) for name in glob.iglob(pattern, recursive=True))  # noqa: PTH207
    files = [file for file in found if file.name.endswith(tuple(suffixes)) and file.is_file()]
    if place.is_file():
        files = [place]
    if not files:
        what = "has no" if place.is_dir() else "does not exist. Must be a folder, a file or a pattern of"
        raise UserError(f"source.path={path}: {what} {' or '.join(suffixes)} files")
    base = place if place.is_dir() else Path(os.path.commonpath([file.parent for file in files]))
    return [
        DataFile(file, file.relative_to(base).as_posix(), f"{file.stat().st_size}-{file.stat().st_mtime_ns}")
        for file in files[: take.of(len(files))]
    ]


def inside(root: str, name: str) -> Path:
    """Return the regular file of a name that the data holds, below a root.

    Raises:
        BadSampleError: for a name or link that leaves the root, and for anything but a regular file.
    """
    if "\0" in name or not name:
        raise BadSampleError(Reason.OUTSIDE, repr(name[:80]))
    if not root:
        raise BadSampleError(Reason.OUTSIDE, f"{name}: source.root says where its files are")
    base = _real(root)
    if leaves_root(name.removeprefix(base + os.sep)):
        raise BadSampleError(Reason.OUTSIDE, name)
    try:
        path = os.path.realpath(os.path.join(base, name), strict=True)  # noqa: PTH118
        mode = os.stat(path).st_mode  # noqa: PTH116
    except (OSError, ValueError) as error:
        raise BadSampleError(Reason.MISSING, name) from error
    if not path.startswith(base.rstrip(os.sep) + os.sep) and path != base:
        raise BadSampleError(Reason.OUTSIDE, f"{name}: a link")
    # A pipe would block its reader.
    if not stat.S_ISREG(mode):
        raise BadSampleError(Reason.MISSING, f"{name}: no regular file")
    return Path(path)


def leaves_root(name: str) -> bool:
    """Return whether a name is absolute or has ``..``, on any system."""
    parts = name.replace("\\", "/").split("/")
    return parts[0] == "" or ".." in parts or parts[0].endswith(":")


@lru_cache(maxsize=16)
def _real(root: str) -> str:
    return os.path.realpath(root)
