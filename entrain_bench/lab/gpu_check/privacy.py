"""Names of people, machines and folders, taken out of what is sent to others."""

from __future__ import annotations

import getpass
import platform
import re
import sys
import tempfile
from pathlib import Path

from entrain_bench.config.tree import config_tree


class Scrubber:
    """Replaces the names of this machine, its user and its folders.

    Args:
        folders: what stands for a folder, by folder.
        user: whose account this is.
        host: what the machine is called.
    """

    def __init__(self, folders: dict[str, str], user: str, host: str) -> None:
        # The longest first: a project is inside of the home folder.
        self._folders = sorted(folders.items(), key=lambda item: -len(item[0]))
        self._user = re.compile(rf"(?<=[/@\\-]){re.escape(user)}(?=[/@\s\"'\\]|$)|\b{re.escape(user)}(?=@)")
        # Libraries print all of it or its first part (NCCL). A number is no name, and stands for something else.
        hosts = [name for name in dict.fromkeys((host, host.partition(".")[0])) if name and not name.isdigit()]
        names = "|".join(map(re.escape, hosts))
        # JSON has a line's end as two characters.
        self._host = re.compile(rf"(?:(?<![\w.-])|(?<=\\[nrt]))(?:{names})(?![\w-])") if hosts else None

    @classmethod
    def of_this_machine(cls) -> Scrubber:
        """That of whoever runs this process."""
        tree = config_tree()
        folders = {str(place): "." for place in (Path.cwd(), tree.parent, tree.resolve().parent)}
        folders |= {str(Path.home()): "~", tempfile.gettempdir(): "/tmp", sys.prefix: ".venv"}  # noqa: S108
        return cls({path: name for path, name in folders.items() if len(path) > 1}, _user(), platform.node())

    def text(self, text: str) -> str:
        """A text without these names."""
        for path, name in self._folders:
            text = re.sub(rf"{re.escape(path)}(?![\w.-])", name, text)
        text = self._user.sub("user", text)
        return self._host.sub("host", text) if self._host else text

    def content(self, content: bytes) -> bytes:
        """A file's content without these names; bytes that are no UTF-8 stay as they are."""
        return self.text(content.decode(errors="surrogateescape")).encode(errors="surrogateescape")


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "nobody"
