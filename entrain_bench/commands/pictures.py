"""What MLflow and the report show as pictures; drawing is imported when something is drawn, for it takes a second."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from entrain_bench.answers.answer import Answer
from entrain_bench.records.records import Record, Results


@dataclass(frozen=True, slots=True)
class Pictures:
    """Pictures of the runs of a results folder (``answers.answer.Pictures``)."""

    results: Results

    def standings(self, answer: Answer) -> bytes:
        """Iteration times of a sweep."""
        from entrain_bench.figures._standings import standings_png

        return standings_png(answer)

    def ranks(self, record: Record) -> bytes:
        """Memory and time of the ranks of a run whose timeline is there."""
        from entrain_bench.figures._ranks import ranks_png

        return ranks_png(self.results, record)

    def fidelity(self, rows: pd.DataFrame) -> bytes:
        """Predicted against measured, of the rows of one prediction."""
        from entrain_bench.answers.fidelity import pair_rows
        from entrain_bench.figures._runner import render
        from entrain_bench.lab.fidelity import figure

        return render(lambda: figure.draw(rows, pair_rows(rows)))["png"]
