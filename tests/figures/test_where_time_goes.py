"""Bars of where time goes are whole, in the families' order, and say what they are not drawn of."""

from __future__ import annotations

import pandas as pd
import pytest
from matplotlib.patches import Rectangle

from entrain_bench.answers.text import TIME_WORDS
from entrain_bench.figures.where_time_goes import LOOKS, by_family
from entrain_bench.records.time_shares import TIME_SHARES
from support.figures import MANY, TRACES, drawn, table, written


def test_every_bar_is_whole_and_in_the_order_of_its_classes() -> None:
    figure, shown = drawn("where_time_goes", table(MANY, TRACES))
    assert len(shown) == len(MANY) * len(TRACES) * 2
    panels = [panel for panel in figure.axes if panel.get_visible()]
    assert len(panels) == len(TRACES) * 2
    for panel in panels:
        rows: dict[float, list[Rectangle]] = {}
        for bar in panel.patches:
            assert isinstance(bar, Rectangle)
            rows.setdefault(bar.get_y(), []).append(bar)
        assert len(rows) == len(MANY)
        for bars in rows.values():
            ends = [bar.get_x() + bar.get_width() for bar in bars]
            assert len(bars) == len(TIME_SHARES)
            assert [0.0, *ends[:-1]] == pytest.approx([bar.get_x() for bar in bars])
            assert ends[-1] == pytest.approx(1.0)


def test_classes_look_different() -> None:
    assert len({*LOOKS.values()}) == len({*TIME_WORDS.values()}) == len(TIME_SHARES)


def test_what_has_no_shares_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    data = table(["one", "two", "three", "four"], TRACES[:1], lambda name, _: "failed" if name == "two" else "ok")
    data.loc[data["strategy"] == "three", [*TIME_SHARES]] = None
    data.loc[(data["strategy"] == "four") & (data["seed"] == 2), "status"] = "failed"
    figure, _ = drawn("where_time_goes", data)
    said = written(figure, monkeypatch)
    # With two models.
    assert [said.count(text) for text in ("failed", "older run", "33*", "33")] == [2, 2, 2, 2]
    assert "number: ideal work in %; *: some seeds fail" in said


def test_families_stand_together_half_a_bar_apart() -> None:
    families = {"base": "out_of_the_box", "a": "published", "x": "out_of_the_box", "b": "published", "own": ""}
    data = pd.DataFrame({"strategy": [*families], "strategy_family": [*families.values()]})
    assert by_family(data) == {"base": 0.0, "a": 1.0, "b": 2.0, "x": 3.5, "own": 5.0}
    assert by_family(data[["strategy"]]) == {name: float(place) for place, name in enumerate(families)}
