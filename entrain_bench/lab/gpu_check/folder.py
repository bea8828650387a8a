"""The folder of a check, which holds nothing else, and the archive of it that is sent to others."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import IO

from entrain_bench.base.errors import UserError, require
from entrain_bench.base.files import stream_atomically
from entrain_bench.lab.gpu_check.privacy import Scrubber

# In every folder that the check has made.
MARK = ".gpu-check"
# Files of text; others are tables of numbers.
TEXTS = (".json", ".log", ".md", ".txt", ".xml", ".csv", ".yaml")


def archive_of(folder: Path) -> Path:
    """Where the archive of a folder is: beside it."""
    return Path(f"{folder}.zip")


def claim(folder: Path) -> None:
    """Make a folder for a check, or go on with the one of an earlier check.

    Raises:
        UserError: if it, or the archive beside it, is something else's, or it cannot be written to.
    """
    require(folder.name not in ("", ".."), "--output", folder, "the name of a folder, such as results/check")
    require(not folder.is_symlink(), "--output", folder, "a folder, not a symbolic link")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / MARK).exists():
            return
        fresh = not any(folder.iterdir())
        require(fresh, "--output", folder, "a new or empty folder, or one that an earlier check has made")
        archive = archive_of(folder)
        require(not archive.exists(), "--output", folder, f"another folder: {archive} is there, and no earlier check's")
        (folder / MARK).touch()
    except OSError as error:
        raise UserError(f"--output={folder}: cannot be written to ({error.strerror})") from error


def archive(folder: Path, scrubber: Scrubber) -> Path:
    """Write the archive of a folder, without the names that texts have; what is in the folder stays as it is.

    Raises:
        OSError: naming the archive, if it cannot be written.
    """

    def write(file: IO[bytes]) -> None:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
            for path in sorted(folder.rglob("*")):
                if path.is_symlink() or not path.is_file():
                    continue
                content = path.read_bytes()
                name = f"{folder.name}/{path.relative_to(folder)}"
                packed.writestr(name, scrubber.content(content) if path.suffix in TEXTS else content)

    place = archive_of(folder)
    stream_atomically(place, write)
    return place
