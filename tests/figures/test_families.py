"""The main figure with many strategies: bars of the baseline and of every family's fastest, marks for the others."""

from __future__ import annotations

import pandas as pd
import pytest

from entrain_bench.figures.iteration_time import groups_of
from support.figures import MANY, MODELS, TRACES, drawn, table, written

# Ten strategies: later ones are slower, the last of a family that is named nowhere.
STRATEGIES = [*MANY, "ninth", "tenth"]
FAMILY = dict.fromkeys(STRATEGIES[1:5], "published") | dict.fromkeys(["alpha", *STRATEGIES[5:9]], "out_of_the_box")


def many(fails: str = "") -> pd.DataFrame:
    data = table(STRATEGIES, TRACES[:2], lambda strategy, _: "failed" if strategy == fails else "ok")
    return data.assign(strategy_family=data["strategy"].map(FAMILY).fillna(""))


def test_the_first_strategy_is_the_baseline_and_stands_in_no_family() -> None:
    assert groups_of(many()) == [
        ("alpha",),
        ("beta", "gamma", "delta", "epsilon"),
        ("zeta", "a_longer_name", "theta", "ninth"),
        ("tenth",),
    ]


@pytest.mark.parametrize(("fails", "best"), [("", 1), ("beta", 2)])
def test_a_family_shows_its_fastest_as_a_bar_and_the_others_as_marks(fails: str, best: int) -> None:
    figure, shown = drawn("iteration_time", many(fails))
    panel = figure.axes[0]
    bars = [patch.get_height() for patch in panel.patches if patch.get_height() > 0]
    times = shown[shown["workload"] == TRACES[0]].set_index(["model", "strategy"])["iteration_time_s"]
    wanted = [times[model, STRATEGIES[place]] for model in MODELS for place in (0, best, 5, 9)]
    assert bars == pytest.approx(wanted)
    marks = [line for line in panel.lines if line.get_marker() == "o"]
    assert len(marks) == len(MODELS) * (len(STRATEGIES) - 4 - bool(fails))


def test_nine_strategies_have_a_bar_each(monkeypatch: pytest.MonkeyPatch) -> None:
    data = many()
    figure, _ = drawn("iteration_time", data[data["strategy"] != "tenth"])
    assert len(figure.axes[0].patches) == 9 * len(MODELS)
    assert "others of the family" not in written(figure, monkeypatch)
