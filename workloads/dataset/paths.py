"""Names of files that data holds: inside of the data's root, or refused."""

from __future__ import annotations

import os
import stat
from functools import lru_cache
from pathlib import Path

from .interface import BadSampleError, Reason


def inside(root: str, name: str) -> Path:
    """The regular file of a relative name below a root; anybody may have written the name.

    Raises:
        BadSampleError: for an absolute name, one that leaves the root (``..``, a link), and what is no regular file.
    """
    if "\0" in name or not name:
        raise BadSampleError(Reason.OUTSIDE, repr(name[:80]))
    if not root:
        raise BadSampleError(Reason.OUTSIDE, f"{name}: source.root says where its files are")
    if leaves_root(name):
        raise BadSampleError(Reason.OUTSIDE, name)
    base = _real(root)
    try:
        path = os.path.realpath(os.path.join(base, name), strict=True)  # noqa: PTH118
        mode = os.stat(path).st_mode  # noqa: PTH116
    except (OSError, ValueError) as error:
        raise BadSampleError(Reason.MISSING, name) from error
    if path != base and not path.startswith(base.rstrip(os.sep) + os.sep):
        raise BadSampleError(Reason.OUTSIDE, f"{name}: a link")
    # A pipe would be waited for.
    if not stat.S_ISREG(mode):
        raise BadSampleError(Reason.MISSING, f"{name}: no regular file")
    return Path(path)


def leaves_root(name: str) -> bool:
    """Whether a name is absolute or has ``..``, on any system."""
    parts = name.replace("\\", "/").split("/")
    return parts[0] == "" or ".." in parts or parts[0].endswith(":")


@lru_cache(maxsize=16)
def _real(root: str) -> str:
    return os.path.realpath(root)
