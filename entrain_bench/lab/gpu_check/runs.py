"""Runs of the suite, each in a process of its own that may fail or hang, and the records that they leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from entrain_bench.base.errors import UserError
from entrain_bench.lab.gpu_check.settings import Setup
from entrain_bench.lab.processes import last_line, run_python
from entrain_bench.records.records import Record, Results
from entrain_bench.run.cells import compose_cells


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs of a section, and the folder where they leave records and output."""

    folder: Path
    setup: Setup

    def predict(self, overrides: Sequence[str], strategies: Sequence[str], timeout_s: float) -> dict[str, Record | str]:
        """Simulate a job under strategies in one process: by strategy a record, or what became of the process."""
        return self._run("predicted", strategies, ["harness=simulate", *overrides], timeout_s)

    def train(
        self, name: str, strategy: str, overrides: Sequence[str], num_devices: int, timeout_s: float
    ) -> Record | str:
        """Train as the run ``name``; the record, or what became of the process if it left none."""
        return self._run(name, [strategy], [*self.setup.training(num_devices), *overrides], timeout_s)[strategy]

    def _run(
        self, name: str, strategies: Sequence[str], overrides: Sequence[str], timeout_s: float
    ) -> dict[str, Record | str]:
        log, results = self.folder / f"{name}.log", Results(self.folder / name)
        given = [f"strategy={','.join(strategies)}", *overrides, f"results_dir={results.root}", "mlflow=false"]
        try:
            cells = compose_cells(given, multirun=True)
        except UserError as error:
            return dict.fromkeys(strategies, str(error))
        # The folder has records of other devices, code and options, too: what counts is of these cells. What an earlier
        # process left unfinished would be taken for what this one leaves.
        for cell in cells:
            if not (found := results.read(cell.key)) or not found.finished:
                results.record_path(cell.key).unlink(missing_ok=True)
        wrong = run_python(["-m", "entrain_bench.cli", "--multirun", *given], log, timeout_s, self.setup.environment)
        lost = f"{wrong or 'left no record of this configuration and code'} ({last_line(log)})"
        return {strategy: results.read(cell.key) or lost for strategy, cell in zip(strategies, cells, strict=True)}


def problem_of(run: Record | str) -> str:
    """Why a run has no result; empty if it has one."""
    if isinstance(run, str):
        return run
    return "" if run.status == "ok" else run.reason or run.status


def layout_of(record: Record) -> str:
    """The layout of a run as one text."""
    return "; ".join(f"{module} {text}" for module, text in record.layout.items())


def series(record: Record, metric: str) -> list[float]:
    """A metric of every iteration of a run."""
    return [float(row[metric]) for row in record.iterations]
