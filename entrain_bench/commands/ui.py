"""``entrain-bench ui [KEY=VALUE ...]``: show the runs of a folder in MLflow on 127.0.0.1."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from entrain_bench.answers.tracking.log import links
from entrain_bench.base.errors import UserError, no_runs, require
from entrain_bench.commands.watch import say
from entrain_bench.config.grammar import Folder, Request, Verb, own
from entrain_bench.records.records import Results

HOST = "127.0.0.1"
PORT = 5000
# Experiments whose links are printed.
MAX_LINKS = 10
# Nothing is sent, only the pages run, and libraries warn of nothing that a user could change.
QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "PYTHONWARNINGS": "ignore",
}


@dataclass(frozen=True, slots=True)
class Keys(Folder):
    """Own keys."""

    port: int = own(PORT, "port of the server, in 1..65535")

    def __post_init__(self) -> None:
        """Check ranges."""
        require(0 < self.port < 2**16, "port", self.port, "in 1..65535")


VERB = Verb(Keys, options=())


def main(request: Request[Keys]) -> int:
    """Serve the runs until interrupted; returns the server's exit code; ``UserError`` if the port is taken."""
    port = request.keys.port
    results = Results(Path(request.keys.results_dir))
    lines = links(results, f"http://{HOST}:{port}", MAX_LINKS)
    if not lines:
        raise no_runs(results.root)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise UserError(f"port={port}: must be free ({error.strerror})") from error
    command = server_command(results, port)
    # The server ends with this process.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # A session of its own, so that it can be ended with its child processes. Its standard output has notes on its
    # defaults alone; errors are on the other.
    quiet = os.environ | QUIET
    with subprocess.Popen(command, env=quiet, start_new_session=True, stdout=subprocess.DEVNULL) as server:
        try:
            say("MLflow starts in about 15 s; then open")
            print("\n".join(lines), flush=True)
            return server.wait()
        except KeyboardInterrupt:
            return 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGTERM)


def server_command(results: Results, port: int) -> list[str]:
    """Return the command that serves a results folder, wherever it is now."""
    from entrain_bench.answers.tracking.folder import ARTIFACTS, store_uri

    return [
        *(sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"),
        *("--backend-store-uri", store_uri(results)),
        *("--artifacts-destination", (results.root / ARTIFACTS).resolve().as_uri()),
    ]
