"""What a run's ranks are said to hold and do adds up, and pictures are drawn of whatever there is."""

from __future__ import annotations

import pandas as pd
import pytest

from entrain_bench.figures._ranks import IDLE, PARTS, draw, rank_table
from entrain_bench.figures._style import small_png

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


@pytest.mark.wide
@pytest.mark.parametrize("columns", [[*ACTIONS], [name for name in ACTIONS if name != "memory_bytes"]])
@pytest.mark.parametrize("budget_bytes", [None, 8.0 * 2**30])
def test_the_same_ranks_are_the_same_picture(columns: list[str], budget_bytes: float | None) -> None:
    table = rank_table(ACTIONS[columns])
    first, again = (small_png(lambda: draw(table, budget_bytes)) for _ in range(2))
    assert first == again
    assert first.startswith(b"\x89PNG")
