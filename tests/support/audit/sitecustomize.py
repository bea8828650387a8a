"""Python imports this first, in every process that has its folder on PYTHONPATH: it notes what no run may do."""

import os
import sys
from pathlib import Path
from typing import Any

LOG = os.open(os.environ["AUDIT_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
ALLOWED = (os.environ["AUDIT_FOLDER"], "/dev/", "/proc/")
FOREIGN = frozenset(os.environ["AUDIT_FOREIGN"].split(","))
STARTS = frozenset({"os.exec", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen"})
# They tell of a commit, of fonts, of libraries.
ASKED = frozenset({"fc-list", "git", "ldconfig"})
CALLS = frozenset({"__import__", "compile", "eval", "exec", "getattr", "open"})
# These ask the network.
ALWAYS = frozenset({"ftplib.connect", "socket.getaddrinfo", "socket.gethostbyname", "urllib.Request"})
CHANGES = frozenset({"os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate"})
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def _is_elsewhere(path: Any) -> bool:
    """Whether a path is outside of where a run may write; compiled code is Python's own to keep."""
    if not isinstance(path, str | bytes | os.PathLike):
        return False
    text = os.path.abspath(os.fsdecode(path))  # noqa: PTH100
    return not text.startswith(ALLOWED) and "__pycache__" not in text


def _is_forbidden(event: str, args: tuple[Any, ...]) -> bool:
    if event == "import":
        return str(args[0]).partition(".")[0] in FOREIGN
    if event == "open":
        path, mode, flags = args
        writes = any(letter in mode for letter in "wax+") if isinstance(mode, str) else flags & WRITING
        return bool(writes) and _is_elsewhere(path)
    if event == "socket.connect":
        return isinstance(args[1], tuple)
    if event == "pickle.find_class":
        return str(args[0]).partition(".")[0] in FOREIGN | {"os", "posix", "subprocess"} or args[1] in CALLS
    if event in STARTS:
        return Path(os.fsdecode(args[0] or b"")).name not in ASKED
    return event in ALWAYS or (event in CHANGES and any(map(_is_elsewhere, args)))


def _note(event: str, args: tuple[Any, ...]) -> None:
    if _is_forbidden(event, args):
        os.write(LOG, f"{event} {args!r}\n"[:500].encode())


sys.addaudithook(_note)
