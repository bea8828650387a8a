"""What MLflow shows of a sweep as pictures; drawing is imported when something is drawn, for it takes a second."""

from __future__ import annotations

from dataclasses import dataclass

from entrain_bench.records.records import Record, Results
from entrain_bench.tracking.sweep import Sweep


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
