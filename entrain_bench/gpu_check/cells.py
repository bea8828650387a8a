"""Runs of the suite, each in a process of its own that may fail or hang, and the records that they leave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from entrain_bench.gpu_check.processes import last_line, run_python
from entrain_bench.gpu_check.settings import Setup
from entrain_bench.records.records import Record, Results


@dataclass(frozen=True, slots=True)
class Runs:
    """Where a step's runs leave records and output.

    Attributes:
        folder: of the step.
        setup: the devices.
    """

    folder: Path
    setup: Setup

    def predict(self, overrides: Sequence[str], strategies: Sequence[str], timeout_s: float) -> dict[str, Record]:
        """Simulate a job under strategies, all in one process; records by strategy."""
        choice = f"strategy={','.join(strategies)}"
        self._run("predicted", ["harness=simulate", choice, *overrides], timeout_s)
        return {str(record.labels["strategy"]): record for record in self._records("predicted")}

    def train(
        self, name: str, strategy: str, overrides: Sequence[str], num_devices: int, timeout_s: float
    ) -> Record | str:
        """Train; the record, or what became of the process if it left none.

        Args:
            name: of the run in this step.
            strategy: its name.
            overrides: of the job.
            num_devices: ranks.
            timeout_s: longest time.
        """
        given = [f"strategy={strategy}", *self.setup.training(num_devices), *overrides]
        wrong = self._run(name, given, timeout_s)
        records = self._records(name)
        if records:
            return records[-1]
        return f"{wrong or 'left no record'} ({last_line(self._log(name))})"

    def _run(self, name: str, overrides: Sequence[str], timeout_s: float) -> str:
        # What a killed run had written; one that is finished stays, and is not run again.
        arguments = ["-m", "entrain_bench.cli", "--multirun", *overrides]
        arguments += [f"results_dir={self.folder / name}", "mlflow=false"]
        return run_python(arguments, self._log(name), timeout_s, self.setup.environment)

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _records(self, name: str) -> list[Record]:
        """Records of a name, the newest last: of a setting that changed there are several."""
        results = Results(self.folder / name)
        return sorted(results.records(), key=lambda record: results.record_path(record.key).stat().st_mtime)


def layout_of(record: Record) -> str:
    """The layout of a run as one text."""
    return "; ".join(f"{module} {text}" for module, text in record.layout.items())


def series(record: Record | None, metric: str) -> list[float]:
    """A metric of every iteration of a run; empty without one."""
    if record is None or record.status != "ok":
        return []
    return [float(row[metric]) for row in record.iterations]


def metrics_of(record: Record | None, names: Mapping[str, str], scale: Mapping[str, float]) -> dict[str, float]:
    """Some metrics of a run by the names that a table has for them, as far as the run has them."""
    if record is None or record.status != "ok":
        return {}
    found = {name: record.metrics.get(metric) for name, metric in names.items()}
    return {name: value * scale.get(name, 1.0) for name, value in found.items() if value is not None}
