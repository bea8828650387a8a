"""Bars of where time goes are whole, the most ideal work on top."""

from __future__ import annotations

import pytest
from matplotlib.patches import Rectangle

from entrain_bench.records.time_shares import TIME_SHARES
from support.figures import MANY, TRACES, drawn, table


def test_every_bar_is_whole_and_in_the_order_of_its_classes() -> None:
    figure, shown, _ = drawn("where_time_goes", table(MANY, TRACES))
    assert len(shown) == len(MANY) * len(TRACES) * 2
    rows: dict[float, list[Rectangle]] = {}
    for bar in figure.axes[0].patches:
        assert isinstance(bar, Rectangle)
        rows.setdefault(bar.get_y(), []).append(bar)
    assert len(rows) == len(MANY)
    for bars in rows.values():
        ends = [bar.get_x() + bar.get_width() for bar in bars]
        assert len(bars) == len(TIME_SHARES)
        assert [0.0, *ends[:-1]] == pytest.approx([bar.get_x() for bar in bars])
        assert ends[-1] == pytest.approx(1.0)


def test_strategies_without_a_result_are_named_and_those_without_shares_left_out() -> None:
    data = table(["one", "two", "three"], TRACES[:1], lambda name, _: "failed" if name == "two" else "ok")
    data.loc[data["strategy"] == "three", [*TIME_SHARES]] = None
    figure, _, message = drawn("where_time_goes", data)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["ONE"]
    assert "TWO (6 runs: failed)" in message
