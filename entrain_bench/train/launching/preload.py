"""Imports of ranks, made once by the server that they fork from; without warnings about missing packages."""

from __future__ import annotations

import os
from contextlib import suppress

_stderr = os.dup(2)
_nowhere = os.open(os.devnull, os.O_WRONLY)
os.dup2(_nowhere, 2)
# What goes wrong here goes wrong on the ranks again, which report it.
with suppress(Exception):
    import entrain_bench.train.running.loop  # noqa: F401
os.dup2(_stderr, 2)
os.close(_stderr)
os.close(_nowhere)
