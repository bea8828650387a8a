"""``entrain-bench ui``: MLflow's pages of the runs on 127.0.0.1, and links to those that answer."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from entrain_bench.answers.tracking.local import ARTIFACTS, LocalStore, store_uri
from entrain_bench.answers.tracking.page import run_link, runs_link
from entrain_bench.base.errors import ExecutionError, UserError, require
from entrain_bench.records.records import Results

HOST = "127.0.0.1"
PORT = 5000
# The server imports for about 15 s, longer on a busy machine.
START_S, POLL_S = 120.0, 0.5
# Experiments whose links are printed.
MAX_LINKS = 10
# Only links go to standard output.
STDERR = 2
# Nothing is sent, and nothing runs beside the pages.
QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}


def main(arguments: Sequence[str]) -> int:
    """Serve the runs until interrupted.

    Returns:
        The server's exit code.

    Raises:
        UserError: where nothing is logged, and for a port that is taken.
        ExecutionError: if the server does not start.
    """
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="entrain-bench ui",
        description=f"Browse the runs in MLflow on {HOST}; prints where to look first.",
    )
    parser.add_argument("--results-dir", default="results", help="where runs are (default: results)")
    parser.add_argument("--port", type=int, default=PORT, help=f"default: {PORT}")
    options = parser.parse_args(arguments)
    results = Results(Path(options.results_dir))
    found = links(results, f"http://{HOST}:{options.port}")
    if not found:
        raise UserError(f"--results-dir={options.results_dir}: no runs are logged there; run some (make quick)")
    _check_port(options.port)
    command = server_command(results, options.port)
    # Whoever ends this process ends the server.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # A session of its own, so that it can be ended with what it starts.
    with subprocess.Popen(command, env=os.environ | QUIET, start_new_session=True, stdout=STDERR) as server:
        try:
            _wait_for(server, options.port)
            print("\n".join(found), flush=True)
            return server.wait()
        except KeyboardInterrupt:
            return 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGTERM)


def server_command(results: Results, port: int) -> list[str]:
    """The command that serves a results folder, wherever it is now."""
    return [
        *(sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"),
        *("--backend-store-uri", store_uri(results)),
        *("--artifacts-destination", (results.root / ARTIFACTS).resolve().as_uri()),
    ]


def links(results: Results, base: str) -> list[str]:
    """Lines with the pages of the experiments logged last: the summary of a sweep, and its runs, the fastest first.

    Args:
        results: where runs are.
        base: the server's address.
    """
    lines = []
    for experiment, name, sweep in LocalStore(results).experiments()[:MAX_LINKS]:
        summary = [f"  summary: {run_link(base, experiment, sweep)}"] if sweep else []
        lines += [name, *summary, f"  runs:    {runs_link(base, experiment)}"]
    return lines


def _check_port(port: int) -> None:
    require(0 < port < 2**16, "--port", port, "in 1..65535")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise UserError(f"--port={port}: must be free ({error.strerror})") from error


def _wait_for(server: subprocess.Popen[bytes], port: int) -> None:
    """Return once the server answers."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urlopen(f"http://{HOST}:{port}/health", timeout=POLL_S):
                return
        except (URLError, OSError):
            time.sleep(POLL_S)
    raise ExecutionError("MLflow's server did not start")
