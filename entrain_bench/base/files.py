"""Files that appear complete or not at all, and folders that disappear with the process that made them."""

import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import IO

PARTIAL = ".partial"
# Reads paths until the writing process has ended, then removes them, repeatedly: its children may still write there.
GUARD = """
set --
while IFS= read -r path; do set -- "$@" "$path"; done
for pause in 0 0.2 1 5; do
  sleep "$pause"
  rm -rf -- "$@"
done
"""


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file atomically: no reader sees a partial file, even after a crash. ``OSError`` names the file."""
    stream_atomically(path, lambda file: file.write(content))


def stream_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Call ``write`` with a temporary file, then move the file into place; ``write`` may be called again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        while not _written(path, write):
            pass
    except OSError as error:
        # A full disk does not say where it was met.
        raise OSError(error.errno, error.strerror, str(path)) from error


def _written(path: Path, write: Callable[[IO[bytes]], object]) -> bool:
    """Write a temporary file and move it into place; False if another process removed the temporary file."""
    prefix = f".{path.name}."
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=prefix, suffix=PARTIAL, delete=False) as file:
        temporary = Path(file.name)
        try:
            # Held as long as this process lives. On a file system without locks, partial files are never removed.
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            if not temporary.exists():
                return False
            write(file)
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), 0o644)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    return True


def remove_partial(folder: Path) -> None:
    """Remove partial files of killed processes, recursively. Skip files that a live process has locked."""
    for place, _, names in os.walk(folder):
        for partial in (Path(place, name) for name in names if name.startswith(".") and name.endswith(PARTIAL)):
            # Moved to its place meanwhile, or removed; not ours; or locked.
            with suppress(OSError), partial.open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                partial.unlink()


@contextmanager
def temporary_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """A folder that is removed afterwards, or by a process of its own as soon as this process is killed."""
    folder = (parent or Path(tempfile.gettempdir())) / f"{prefix}{secrets.token_hex(8)}"
    command = ["/bin/sh", "-c", GUARD]
    guard = Popen(command, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, cwd="/", start_new_session=True)
    assert guard.stdin
    try:
        # Registered before it exists, so that it is always removed.
        guard.stdin.write(f"{folder.absolute()}\n".encode())
        guard.stdin.flush()
        folder.mkdir(mode=0o700)
        yield folder
    finally:
        with suppress(FileNotFoundError):
            shutil.rmtree(folder)
        guard.kill()
        guard.communicate()
