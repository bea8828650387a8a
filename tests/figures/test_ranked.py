"""Figures that rank: the order of strategies, times over the fastest's, what is said of missing results."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PathCollection
from matplotlib.colors import to_rgb

from entrain_bench.answers.labels import spell
from entrain_bench.answers.tables import ALL
from entrain_bench.figures._style import FAMILY_COLOURS
from entrain_bench.figures._tables import time_over_fastest, with_all
from support.figures import MANY, MODELS, TRACES, drawn, errors, table, written

STRATEGIES = [*MANY, "ninth", "tenth"]
FAMILY = dict.fromkeys(STRATEGIES[1:5], "published") | dict.fromkeys(STRATEGIES[5:9], "out_of_the_box")


def many(fails: str = "") -> pd.DataFrame:
    """Later strategies are slower; one fails at one seed."""
    data = table(STRATEGIES, TRACES[:2])
    lost = (data["strategy"] == fails) & (data["seed"] == 2)
    data = data.assign(status=data["status"].mask(lost, "failed"))
    return data.assign(strategy_family=data["strategy"].map(FAMILY).fillna(""))


def test_strategies_stand_by_their_time_over_the_fastest() -> None:
    figure, shown, _ = drawn("iteration_time", many())
    dots, heatmap = figure.axes
    assert [label.get_text() for label in dots.get_yticklabels()] == [spell(name) for name in STRATEGIES]
    (marks,) = [drawn_as for drawn_as in dots.collections if isinstance(drawn_as, PathCollection)]
    colours = [tuple(colour[:3]) for colour in np.asarray(marks.get_facecolor())]
    assert colours == [pytest.approx(to_rgb(FAMILY_COLOURS[FAMILY.get(name, "")])) for name in STRATEGIES]
    # Beta takes 1.1 + 0.01 seed where Alpha takes 1 + 0.01 seed, on every job.
    ratios = [(1.1 + 0.01 * seed) / (1 + 0.01 * seed) for seed in range(3)]
    mean = math.prod(ratios) ** (1 / 3)
    numbers = [text.get_text() for text in heatmap.texts if text.get_text()][: len(MODELS) * 2 * 2]
    assert numbers[4:] == [f"{mean:.2f}"] * 4
    first = (shown["workload"] == TRACES[0]) & (shown["model"] == MODELS[0])
    assert shown[first].set_index("strategy").loc["beta", "behind"] == pytest.approx(mean)
    overall = time_over_fastest(many())
    assert overall.loc["beta", "mean"] == pytest.approx(sum(ratios) / 3)
    assert overall.loc["beta", "low"] < overall.loc["beta", "mean"] < overall.loc["beta", "high"]
    assert overall.loc["alpha"].tolist() == [1.0, 1.0, 1.0]


def test_a_strategy_that_lacks_a_seed_has_a_star_and_is_named() -> None:
    figure, _, message = drawn("iteration_time", many("alpha"))
    assert "Alpha*" in [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert "Beta in 4" in message
    assert "Alpha (4 runs: failed)" in message


@pytest.mark.parametrize("status", ["failed", "skipped", "missing"])
def test_nothing_but_gaps_still_draws(status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = table(["first", "second"], status=lambda *_: status)
    figure, shown, message = drawn("iteration_time", data)
    assert any("no strategy" in text for text in written(figure, monkeypatch))
    assert status in message
    assert shown["iteration_time_s"].isna().all()


def test_all_traces_are_the_geometric_mean_of_those_with_a_result() -> None:
    data = with_all(many("beta"))
    means = data[data["workload"] == ALL].set_index(["model", "strategy", "seed"])
    traces = data[data["workload"] != ALL].set_index(["model", "strategy", "seed"])["iteration_time_s"]
    first, second = traces.loc[MODELS[0], "gamma", 1]
    assert means.loc[(MODELS[0], "gamma", 1), "iteration_time_s"] == pytest.approx((first * second) ** 0.5)
    assert means.loc[(MODELS[0], "beta", 2), "status"] == "failed"
    assert with_all(table(["one"], TRACES[:1]))["workload"].unique().tolist() == TRACES[:1]


def test_errors_of_estimates_rank_the_least_affected_first() -> None:
    data = errors(["alpha", "beta", "theta"], TRACES[:1])
    exact = data["strategy"] == "theta"
    times = data["iteration_time_s"].where(~exact, data["iteration_time_s"] / (1 + 2 * data["belief_error"]))
    figure, _, message = drawn("misprediction", data.assign(iteration_time_s=times))
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["Theta", "Alpha", "Beta"]
    assert [text.get_text() for text in figure.axes[0].texts] == ["+0%", "+100%", "+100%"]
    assert "Alpha most: +100% time" in message
    assert "Theta" in message
