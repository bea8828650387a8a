"""Sweeps whose runs figures and documents need: composed once, run where results are missing."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path

from entrain_bench.cli import EXIT_FAILED, EXIT_INTERRUPTED, run_command
from entrain_bench.config.command_line import Cell, compose_cells
from entrain_bench.records.keys import identify
from entrain_bench.records.records import Results

LAUNCHER = "hydra_plugins.hydra_joblib_launcher"
# Every process compiles the timed loops anew and holds about half a GiB.
MAX_PROCESSES = 8


class Sweeps:
    """The cells of sweeps, each sweep composed and run at most once; a sweep is its overrides."""

    def __init__(self, results_dir: str) -> None:
        self.results = Results(Path(results_dir))
        self._cells: dict[tuple[str, ...], list[Cell]] = {}
        self._problems: dict[tuple[str, ...], str] = {}

    def cells(self, *overrides: str) -> list[Cell]:
        """The cells of a sweep."""
        if overrides not in self._cells:
            self._cells[overrides] = compose_cells([*overrides, self._folder()], multirun=True)
        return self._cells[overrides]

    def run(self, *overrides: str) -> str:
        """Run the cells that have no result; returns what is wrong with those that still have none."""
        if overrides not in self._problems:
            cells = self.cells(*overrides)
            if self._unfinished(cells):
                self._sweep(overrides)
            left = self._unfinished(cells)
            self._problems[overrides] = f"{len(left)} of {len(cells)} runs have no result: {left[0]}" if left else ""
        return self._problems[overrides]

    def _folder(self) -> str:
        folder = str(self.results.root).replace("\\", "\\\\").replace("'", "\\'")
        return f"results_dir='{folder}'"

    def _sweep(self, overrides: Iterable[str]) -> None:
        try:
            code = run_command(["--multirun", *overrides, self._folder(), *parallel_overrides()])
        except SystemExit as stopped:  # Hydra's way out when a launcher fails; cells may be left without a record
            code = stopped.code if isinstance(stopped.code, int) else EXIT_FAILED
        if code == EXIT_INTERRUPTED:
            raise KeyboardInterrupt

    def _unfinished(self, cells: Iterable[Cell]) -> list[str]:
        """The reasons of the cells that failed or never ran."""
        records = [self.results.read(identify(cell.config)[0]) for cell in cells]
        reasons = ["not run" if record is None else record.reason or record.status for record in records]
        return [
            reason for record, reason in zip(records, reasons, strict=True) if record is None or not record.finished
        ]


def parallel_overrides() -> list[str]:
    """What makes a sweep use several cores, where there are several and the launcher for it is installed."""
    processes = min(os.cpu_count() or 1, MAX_PROCESSES)
    if processes == 1 or importlib.util.find_spec(LAUNCHER) is None:
        return []
    return ["hydra/launcher=joblib", f"hydra.launcher.n_jobs={processes}"]
