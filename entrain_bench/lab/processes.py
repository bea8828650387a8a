"""Commands in processes of their own: what they print goes to a file, and none runs longer than it may."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

# What a command that is told to end may take to end its ranks and tidy up.
END_S = 15.0


def run_python(arguments: Sequence[str], log: Path, timeout_s: float, environment: Mapping[str, str]) -> str:
    """Run Python with arguments, output added to the log; whatever ends this process early ends the other one, too.

    Returns what was wrong, in a few words; empty if it ended with exit code 0.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        output.write(f"$ python {' '.join(arguments)}\n".encode())
        output.flush()
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return f"took longer than {timeout_s:g} s"
        finally:
            # With all that it started.
            if process.poll() is None:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exit code {code}" if code else ""


def last_line(log: Path) -> str:
    """The last line of what a command printed that is not empty."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
