"""Command lines that run sweeps again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

COMMAND = "entrain-bench"


def command_line(arguments: Sequence[str], config_dir: str | None = None) -> str:
    """A command as a shell takes it, with the user's folder if there is one."""
    folder = ["--config-dir", config_dir] if config_dir else []
    return shlex.join([COMMAND, *arguments, *folder])


def sweep_command(overrides: Sequence[str], config_dir: str | None = None) -> str:
    """The command that runs a sweep."""
    return command_line(["--multirun", *overrides], config_dir)
