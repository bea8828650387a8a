"""Names of people, machines and folders, taken out of what is sent to others."""

from __future__ import annotations

import getpass
import platform
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from entrain_bench.config.tree import config_tree
from entrain_bench.gpu_check.result import Finding, Rows

# Files of text in a report's folder; others are Parquet tables of numbers.
TEXTS = (".json", ".log", ".md", ".txt", ".xml", ".csv")
LOGS = (".log", ".txt", ".xml")
# Columns of what a process has printed.
PRINTED = ("reason", "value")


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
        self._user = re.compile(rf"(?<=[/@\\-]){re.escape(user)}(?=[/@\s\"']|$)|\b{re.escape(user)}(?=@)")
        self._host = re.compile(rf"(?<![\w.-]){re.escape(host)}(?![\w-])") if host else None

    @classmethod
    def of_this_machine(cls) -> Scrubber:
        """That of whoever runs this process."""
        tree = config_tree()
        folders = {str(place): "." for place in (Path.cwd(), tree.parent, tree.resolve().parent)}
        folders |= {str(Path.home()): "~", tempfile.gettempdir(): "/tmp", sys.prefix: ".venv"}  # noqa: S108
        return cls({path: name for path, name in folders.items() if len(path) > 1}, _user(), platform.node())

    def folders(self, text: str) -> str:
        """A text without the names of folders, and of the user in others."""
        for path, name in self._folders:
            text = re.sub(rf"{re.escape(path)}(?![\w.-])", name, text)
        return self._user.sub("user", text)

    def everything(self, text: str) -> str:
        """A text without the machine's name either."""
        text = self.folders(text)
        return self._host.sub("host", text) if self._host else text

    def finding(self, found: Finding) -> Finding:
        """A finding without names in what processes have printed."""
        tables = {title: self._rows(rows) for title, rows in found.tables.items()}
        return replace(found, result=self.everything(found.result), tables=tables)

    def _rows(self, rows: Rows) -> Rows:
        return [row | {name: self.everything(str(row[name])) for name in PRINTED if name in row} for row in rows]

    def clean(self, folder: Path) -> None:
        """Rewrite the texts of a folder in which there is such a name."""
        for path in _texts(folder):
            before = path.read_text(errors="replace")
            after = (self.everything if path.suffix in LOGS else self.folders)(before)
            if after != before:
                path.write_text(after)


def _texts(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.suffix in TEXTS and path.is_file())


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "nobody"
