"""Pictures of an answer and of a run's ranks: order, what they leave out, parts that add up, the same bytes."""

from __future__ import annotations

import pandas as pd
import pytest
from matplotlib.figure import Figure

from entrain_bench.answers.answer import Answer
from entrain_bench.figures._pictures import IDLE, PARTS, draw_standings, rank_table, standings_png
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
        return draw_standings(Answer.of(records))


def test_the_fastest_is_on_top_with_times_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = picture(runs("text"))
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["fast", "middle", "slow"]
    assert {"1.00", "1.50", "2.00"} < {*written(figure, monkeypatch)}


def test_the_same_data_gives_the_same_bytes() -> None:
    answer = Answer.of(runs("text", "image"))
    assert standings_png(answer) == standings_png(answer)


# Rank 0 computes 1 s + 2 s of which 0.5 s communicate, waits 0.25 s for data and steps 0.5 s; rank 2 one forward.
ACTIONS = pd.DataFrame(
    [
        (0, "forward", 0.0, 1.0, 0.0, 0.0, 5.0),
        (0, "backward", 1.25, 3.25, 0.5, 0.25, 7.0),
        (0, "grad_sync", 3.25, 3.5, 0.0, 0.0, 4.0),
        (0, "optimizer", 3.5, 4.0, 0.0, 0.0, 4.0),
        (2, "forward", 0.0, 1.0, 0.0, 0.0, 3.0),
    ],
    columns=["rank", "pass", "start_s", "end_s", "comm_s", "transfer_wait_s", "memory_bytes"],
)


def test_the_parts_of_a_ranks_time_are_its_iteration() -> None:
    first, second = rank_table(ACTIONS).to_dict("records")
    assert [4 * first[part] for part in PARTS] == pytest.approx([1.0, 1.5, 1.0, 0.5])
    assert (first[IDLE], first["rank"], first["peak_bytes"]) == (pytest.approx(0.0), 0, 7.0)
    assert (second["forward"], second[IDLE], second["peak_bytes"]) == (0.25, 0.75, 3.0)
