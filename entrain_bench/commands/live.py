"""A training run while it trains: values of the last iteration on the terminal, and all of them in MLflow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from rich.console import Console
from rich.progress import Progress

from entrain_bench.base.errors import UserError, unknown_choice
from entrain_bench.commands.watch import say
from entrain_bench.config.schema import RunConfig
from entrain_bench.records.records import Results
from entrain_bench.run.experiment import Watcher
from entrain_bench.train.settings import TENSORBOARD, TRACKERS, WANDB

# Seconds between lines where standard error is no terminal.
LINE_S = 10.0
LIVE_TAG = "entrain_bench.live"
# Takes the values of an iteration, and its number.
type Log = Callable[[Mapping[str, float], int], object]
# Values of an iteration as a line shows them, by name.
SHOWN = {
    "loss": "loss {:.4f}",
    "tokens_per_s": "{:,.0f} tokens/s",
    "balance": "balance {:.2f}",
    "peak_memory_bytes": "{:.1f} GiB",
}


def line_of(values: Mapping[str, float]) -> str:
    """The values of an iteration in a line."""
    scaled = {name: value / 2**30 if name.endswith("_bytes") else value for name, value in values.items()}
    return ", ".join(text.format(scaled[name]) for name, text in SHOWN.items() if name in scaled)


class LiveRun:
    """A run of MLflow that exists while one trains; a thread logs, so training never waits for it."""

    def __init__(self, results: Results, uri: str | None, name: str, params: Mapping[str, str]) -> None:
        """Begin nothing before the first values."""
        self._results = results
        self._where = uri, name, params
        self._queue: SimpleQueue[tuple[int, Mapping[str, float]] | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._run: tuple[Any, str] | None = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of an iteration."""
        if self._thread is None:
            self._thread = Thread(target=self._serve, name="mlflow", daemon=True)
            self._thread.start()
        self._queue.put((step, values))

    def end(self, *, failed: bool) -> None:
        """Delete the run, which a complete one replaces, or mark it as failed."""
        if self._thread is None:
            return
        self._queue.put(None)
        self._thread.join()
        if self._run is not None:
            client, run_id = self._run
            if failed:
                client.set_terminated(run_id, "FAILED")
            else:
                client.delete_run(run_id)

    def _serve(self) -> None:
        try:
            self._log_all()
        # MLflow and its servers raise errors of any kind, which must not end training.
        except Exception as error:
            say(f"entrain-bench: MLflow does not get the values of iterations ({' '.join(str(error).split())})")
            self._run = None

    def _log_all(self) -> None:
        # Imported here, for it takes a second.
        from mlflow.entities import Metric, Param

        from entrain_bench.answers.tracking.log import SINGLE_RUNS, experiment_id, open_client, tracking_uri

        given, name, params = self._where
        uri = tracking_uri(given)
        self._results.root.mkdir(parents=True, exist_ok=True)
        client = open_client(self._results, uri)
        run = client.create_run(experiment_id(client, SINGLE_RUNS, uri), tags={LIVE_TAG: "true"}, run_name=name)
        run_id = str(run.info.run_id)
        self._run = client, run_id
        client.log_batch(run_id, params=[Param(key, value) for key, value in params.items()])
        while (step := self._queue.get()) is not None:
            number, values = step
            now_ms = time.time_ns() // 10**6
            client.log_batch(run_id, [Metric(key, value, now_ms, number) for key, value in values.items()])


class Reporter:
    """A run of the tracker that the user chose with ``harness.report_to``."""

    def __init__(self, tracker: str, folder: Path, name: str, params: Mapping[str, str]) -> None:
        """Begin nothing before the first values; ``UserError`` for a tracker that is unknown or not installed."""
        if tracker not in TRACKERS:
            raise unknown_choice("harness.report_to", tracker, TRACKERS)
        if find_spec(tracker) is None:
            raise UserError(f"harness.report_to={tracker}: is not installed. Run pip install {tracker}")
        self._begin = partial(_tensorboard if tracker == TENSORBOARD else _wandb, folder, name, dict(params))
        self._run: tuple[Log, Callable[[int], object]] | None = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of an iteration."""
        self._run = self._run or self._begin()
        self._run[0](dict(values), step)

    def end(self, *, failed: bool) -> None:
        """End the run, which stays."""
        if self._run is not None:
            self._run[1](int(failed))


def _tensorboard(folder: Path, name: str, params: dict[str, str]) -> tuple[Log, Callable[[int], object]]:
    from torch.utils.tensorboard import SummaryWriter

    make: Any = SummaryWriter
    writer = make(folder / "tensorboard" / f"{name} {time.strftime('%Y-%m-%d %H.%M.%S')}")
    writer.add_text("parameters", ", ".join(f"{key}={value}" for key, value in params.items()))

    def log(values: Mapping[str, float], step: int) -> None:
        for key, value in values.items():
            writer.add_scalar(key, value, step)
        writer.flush()

    return log, lambda _: writer.close()


def _wandb(folder: Path, name: str, params: dict[str, str]) -> tuple[Log, Callable[[int], object]]:
    run = import_module(WANDB).init(project="entrain-bench", name=name, config=params, dir=str(folder))
    return run.log, run.finish


@contextmanager
def watched(config: RunConfig, results: Results) -> Iterator[Watcher]:
    """Show a run's progress, with values of iterations that it measures on the way, which go to MLflow, too."""
    name = f"{config.strategy['name']} on {config.workload['name']}"
    params = {group: str(getattr(config, group)["name"]) for group in ("strategy", "workload", "model", "cluster")}
    params["seed"] = str(config.seed)
    trackers: list[LiveRun | Reporter] = []
    if chosen := config.harness.get("report_to"):
        trackers.append(Reporter(chosen, results.root, name, params))
    if config.mlflow:
        trackers.append(LiveRun(results, config.mlflow_uri, name, params))
    console = Console(stderr=True)
    said_s = time.monotonic()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"{config.strategy['name']} iterations", total=config.iterations)

        def watch(done: int, values: Mapping[str, float] | None = None) -> None:
            nonlocal said_s
            text = f"{config.strategy['name']} iterations"
            if values:
                text = f"{text}: {line_of(values)}"
                for tracker in trackers:
                    tracker.log(done - 1, values)
                if not console.is_terminal and time.monotonic() - said_s > LINE_S:
                    said_s = time.monotonic()
                    say(f"iteration {done} of {config.iterations}: {line_of(values)}")
            progress.update(task, completed=done, description=text)

        try:
            yield watch
        except BaseException:
            for tracker in trackers:
                tracker.end(failed=True)
            raise
    for tracker in trackers:
        tracker.end(failed=False)
