"""Start the ranks of one machine with torch's elastic agent, and turn what ends them into one line."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

import pandas as pd
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from entrain_bench.config import RunConfig
from entrain_bench.errors import UserError
from entrain_bench.experiment import Outcome
from entrain_bench.job import LayoutRequest
from entrain_bench.train.wire import layout_from_json, layout_to_json

POLL_S = 0.2


def start_ranks(config: RunConfig, num_ranks: int, progress: Callable[[int], None]) -> Outcome:
    """Train on ranks of this machine.

    Raises:
        UserError: with the first cause, if a rank fails or dies; the agent ends the others.
    """
    with TemporaryDirectory(prefix="entrain-bench-") as folder:
        work = Path(folder)
        (work / "config.json").write_text(config_to_json(config))
        launch = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=POLL_S,
            logs_specs=DefaultLogsSpecs(log_dir=str(work / "logs"), redirects=Std.ALL),
        )
        with _worker_environment(), _reporting(work, progress):
            try:
                elastic_launch(launch, sys.executable)("-m", "entrain_bench.train.worker", str(work))
            except ChildFailedError as error:
                raise _first_cause(error) from error
        return read_outcome(work)


def config_to_json(config: RunConfig) -> str:
    """A run's configuration for the ranks."""
    return json.dumps(config.content() | {"results_dir": config.results_dir, "mlflow": config.mlflow})


def config_from_json(text: str) -> RunConfig:
    """The configuration that ``config_to_json`` wrote."""
    values = json.loads(text)
    return RunConfig(**{**values, "layout": LayoutRequest(**values["layout"])})


def write_outcome(work: Path, outcome: Outcome) -> None:
    """Leave an outcome for the process that started the ranks."""
    if outcome.timeline is not None:
        outcome.timeline.to_parquet(work / "timeline.parquet", index=False)
    values = {
        "layout": layout_to_json(outcome.layout),
        "metrics": dict(outcome.metrics),
        "iterations": [dict(row) for row in outcome.iterations],
    }
    (work / "outcome.json").write_text(json.dumps(values))


def read_outcome(work: Path) -> Outcome:
    """The outcome that rank 0 left."""
    values = json.loads((work / "outcome.json").read_text())
    timeline = work / "timeline.parquet"
    return Outcome(
        layout_from_json(values["layout"]),
        values["metrics"],
        tuple(values["iterations"]),
        pd.read_parquet(timeline) if timeline.exists() else None,
    )


def _first_cause(error: ChildFailedError) -> UserError:
    """The failure that came first; later ones only follow from it."""
    rank, failure = error.get_first_failure()
    message = failure.message
    text = message.get("message", "") if isinstance(message, dict) else str(message)
    if failure.exitcode < 0:
        text = f"was killed by {failure.signal_name()}"
    return UserError(f"rank {rank}: {' '.join(text.split()) or f'exited with code {failure.exitcode}'}")


@contextmanager
def _worker_environment() -> Iterator[None]:
    """What ranks inherit: the same modules, one thread each unless told otherwise, gloo on the loopback interface."""
    wanted = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update({n: v for n, v in wanted.items() if n == "PYTHONPATH" or before[n] is None})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _reporting(work: Path, progress: Callable[[int], None]) -> Iterator[None]:
    """Pass on the number of finished iterations while the ranks run."""
    stopped = threading.Event()

    def poll() -> None:
        while not stopped.wait(POLL_S):
            if (work / "progress").exists():
                progress((work / "progress").stat().st_size)

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
