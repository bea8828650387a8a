"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a reader, or a crash, never sees half of it.

    Raises:
        OSError: naming the file, if it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = Path(file.name)
            try:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            except BaseException:
                temporary.unlink()
                raise
    except OSError as error:
        # A full disk does not say where it was met.
        raise OSError(error.errno, error.strerror, str(path)) from error
    temporary.chmod(0o644)
    temporary.replace(path)
