"""What MLflow shows of a sweep as pictures; drawing is imported when something is drawn, for it takes a second."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from entrain_bench.answers.tracking.sweep import Sweep
from entrain_bench.records.records import Record, Results


class ReportPictures:
    """``report.build.Pictures``."""

    def iteration_time(self, runs: pd.DataFrame) -> bytes:
        """Iteration times of a row a run."""
        from entrain_bench.figures import iteration_time
        from entrain_bench.figures._runner import render

        return render(lambda: iteration_time.draw(runs))["png"]

    def fidelity(self, rows: pd.DataFrame) -> bytes:
        """Predicted against measured, of the rows of one prediction."""
        from entrain_bench.answers.fidelity import pair_rows
        from entrain_bench.figures._runner import render
        from entrain_bench.lab.fidelity import figure

        return render(lambda: figure.draw(rows, pair_rows(rows)))["png"]


@dataclass(frozen=True, slots=True)
class Pictures:
    """``tracking.entries.Pictures`` of the runs of a results folder."""

    results: Results

    def standings(self, sweep: Sweep) -> bytes:
        """Iteration times of a sweep."""
        from entrain_bench.figures._standings import standings_png

        return standings_png(sweep)

    def ranks(self, record: Record) -> bytes:
        """Memory and time of the ranks of a run whose timeline is there."""
        from entrain_bench.figures._ranks import ranks_png

        return ranks_png(self.results, record)
