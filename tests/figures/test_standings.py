"""The picture of an answer: its order, its numbers, the same bytes."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from entrain_bench.answers.answer import Answer
from entrain_bench.figures._plot import draw_runs, standings_png
from entrain_bench.figures._style import styled
from entrain_bench.records.records import Record
from support.figures import written
from support.records import record


def runs(*workloads: str) -> list[Record]:
    """Three strategies at two seeds; the second takes 1.5 times the first's time, the third 2 times."""
    times = {"slow": 2.0, "fast": 1.0, "middle": 1.5}
    return [
        record(name, time * (1 + 0.1 * seed), seed, workload)
        for workload in workloads
        for name, time in times.items()
        for seed in range(2)
    ]


def picture(records: list[Record]) -> Figure:
    with styled():
        return draw_runs(Answer.of(records)).figure


def test_the_fastest_is_on_top_with_times_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = picture(runs("text"))
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["Fast", "Middle", "Slow"]
    assert {"1.00", "1.50", "2.00"} < {*written(figure, monkeypatch)}


@pytest.mark.wide
def test_the_same_data_gives_the_same_bytes() -> None:
    answer = Answer.of(runs("text", "image"))
    assert standings_png(answer) == standings_png(answer)
