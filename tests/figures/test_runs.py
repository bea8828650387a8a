"""Figures of run tables on made-up ones: numbers, order, rankings, gains, and runs without a result."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PathCollection
from matplotlib.patches import Rectangle

from entrain_bench.answers.labels import spell
from entrain_bench.answers.tables import encoder_stages_and_gpus, relative_over_seeds, time_over_fastest
from entrain_bench.config.figures import rows_of
from entrain_bench.figures import out_of_the_box
from entrain_bench.records.records import new_record
from entrain_bench.records.time_shares import TIME_SHARES
from entrain_bench.run.cells import compose_cells
from support.figures import MANY, MODELS, TRACES, changes, drawn, splits, table, written


@pytest.mark.wide
def test_iteration_times_are_means_over_seeds_with_their_spread_and_speedup() -> None:
    _, shown, _ = drawn("iteration_time", table(["first", "second"], TRACES))
    (row,) = shown[
        (shown["workload"] == "chartqa") & (shown["model"] == MODELS[0]) & (shown["strategy"] == "second")
    ].to_dict("records")
    # 4.303 standard errors for two degrees of freedom.
    half = 4.302653 * 0.01 / 3**0.5
    shown_s = [row[f"iteration_time_s{end}"] for end in ("_low", "", "_high")]
    assert shown_s == pytest.approx([1.11 - half, 1.11, 1.11 + half])
    assert row["lower_bound_s"] == pytest.approx(0.6 * 1.11)
    ratios = [1.0 / 1.1, 1.01 / 1.11, 1.02 / 1.12]
    assert row["speedup"] == pytest.approx(math.prod(ratios) ** (1 / 3))
    assert row["speedup_low"] < row["speedup"] < row["speedup_high"] < 1


def test_runs_are_compared_at_seeds_at_which_both_have_a_result() -> None:
    data = pd.DataFrame(
        [
            *(
                ("a", 0, 2.0, "ok"),
                ("a", 1, 9.0, "failed"),
                ("a", 2, 8.0, "ok"),
                ("b", 0, 1.0, "ok"),
                ("c", 1, 1.0, "ok"),
            ),
            *(("base", seed, 1.0, "ok") for seed in range(3)),
        ],
        columns=["strategy", "seed", "iteration_time_s", "status"],
    ).assign(model="m")
    base = data[data["strategy"] == "base"]
    found = relative_over_seeds(data, base, ["model", "strategy"], ["model"])["relative"]
    assert found.to_dict() == pytest.approx({("m", "a"): 4.0, ("m", "b"): 1.0, ("m", "c"): 1.0, ("m", "base"): 1.0})
    none = relative_over_seeds(data, base[:0], ["model", "strategy"], ["model"])
    assert data.join(none, on=["model", "strategy"])["relative"].isna().all()


def test_splits_are_relative_to_the_best_and_the_planners_own_is_marked() -> None:
    _, shown, _ = drawn("sensitivity", splits(TRACES[:1]))
    rows = shown[shown["model"] == MODELS[0]].set_index("encoder_stages")
    assert rows["relative"].to_dict() == pytest.approx({2: 1.3, 3: 1.2, 4: 1.1, 5: 1.0, 6: 1.1, 7: 1.2})
    assert rows["planned"].to_dict() == {2: False, 3: False, 4: True, 5: False, 6: False, 7: False}


def test_degrees_of_encoders_are_those_of_the_record() -> None:
    (cell,) = compose_cells(["model=tiny", "cluster=tiny"])
    degrees = {"llm": {"tp": 2, "cp": 1, "pp": 3, "dp": 4}, "vision": {"tp": 2, "cp": 2, "pp": 5, "dp": 4}}
    assert encoder_stages_and_gpus(cell, replace(new_record(cell, "ok"), degrees=degrees)) == (5, 4)
    assert all(map(math.isnan, encoder_stages_and_gpus(cell, None)))


STRATEGIES = [*MANY, "ninth", "tenth"]
FAMILY = dict.fromkeys(STRATEGIES[1:5], "published") | dict.fromkeys(STRATEGIES[5:9], "out_of_the_box")


def many(fails: str = "") -> pd.DataFrame:
    """Later strategies are slower; one fails at one seed."""
    data = table(STRATEGIES, TRACES[:2])
    lost = (data["strategy"] == fails) & (data["seed"] == 2)
    data = data.assign(status=data["status"].mask(lost, "failed"))
    return data.assign(strategy_family=data["strategy"].map(FAMILY).fillna(""))


@pytest.mark.wide
def test_strategies_stand_by_their_time_over_the_fastest() -> None:
    figure, shown, _ = drawn("iteration_time", many())
    dots, cells = figure.axes
    assert [label.get_text() for label in dots.get_yticklabels()] == [spell(name) for name in STRATEGIES]
    (means,) = (drawn_as for drawn_as in dots.collections if isinstance(drawn_as, PathCollection))
    assert len(cells.texts) == len(STRATEGIES) * 2 * len(MODELS) + len(MODELS)
    # Beta takes 1.1 + 0.01 seed where Alpha takes 1 + 0.01 seed, on every job.
    ratios = [(1.1 + 0.01 * seed) / (1 + 0.01 * seed) for seed in range(3)]
    mean = math.prod(ratios) ** (1 / 3)
    assert dots.texts[1].get_text() == f"{mean:.2f}"
    first = (shown["workload"] == TRACES[0]) & (shown["model"] == MODELS[0])
    assert shown[first].set_index("strategy").loc["beta", "behind"] == pytest.approx(mean)
    overall = time_over_fastest(many())
    assert np.asarray(means.get_offsets())[:, 0] == pytest.approx(overall["mean"].tolist())
    assert overall.loc["beta", "mean"] == pytest.approx(sum(ratios) / 3)
    assert overall.loc["beta", "low"] < overall.loc["beta", "mean"] < overall.loc["beta", "high"]
    assert overall.loc["alpha"].tolist() == [1.0, 1.0, 1.0, 2 * len(MODELS)]


def test_a_mean_is_over_the_jobs_that_a_strategy_has(monkeypatch: pytest.MonkeyPatch) -> None:
    fails = table(["fast", "slow"], status=lambda *case: "failed" if case == ("slow", TRACES[1]) else "ok")
    overall = time_over_fastest(fails)
    assert overall["num_jobs"].to_dict() == {"fast": 4, "slow": 2}
    ratios = [(1.1 + 0.01 * seed) / (1 + 0.01 * seed) for seed in range(3)]
    assert overall.loc["slow", "mean"] == pytest.approx(sum(ratios) / 3)
    assert "Slow (2 jobs)" in written(drawn("iteration_time", fails).figure, monkeypatch)


@pytest.mark.parametrize("status", ["failed", "skipped", "missing"])
def test_nothing_but_gaps_still_draws(status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = table(["first", "second"], status=lambda *_: status)
    figure, shown, message = drawn("iteration_time", data)
    assert any("nothing" in text for text in written(figure, monkeypatch))
    assert status in message
    assert shown["iteration_time_s"].isna().all()


@pytest.mark.wide
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


STACKS = ["deep", "shallow"]


def test_gains_are_over_the_first_strategy_of_the_same_stack_and_seed() -> None:
    data = changes(["arrival", "balanced"], TRACES[:1], STACKS)
    found = out_of_the_box.gains(data).set_index(["row", "model", "strategy"])["speedup"]
    # As made up, the second takes 1.1 + 0.01 seed for the first's 1 + 0.01 seed; in the second row 0.1 of 512 / that.
    ratios = [(1 + 0.01 * seed) / (1.1 + 0.01 * seed) for seed in range(3)]
    assert found["deep", MODELS[0], "balanced"] == pytest.approx((ratios[0] * ratios[1] * ratios[2]) ** (1 / 3))
    assert found["deep", MODELS[0], "arrival"] == pytest.approx(1.0)
    other = [(1 + 0.01 * seed) * (1.1 + 0.01 * seed) / 51.2 for seed in range(3)]
    assert found["shallow", MODELS[0], "balanced"] == pytest.approx((other[0] * other[1] * other[2]) ** (1 / 3))


@pytest.mark.parametrize("row", rows_of("out_of_the_box"))
def test_every_stack_composes(row: str) -> None:
    one = ["figure=out_of_the_box", "strategy=mdp", "workload=coco", "seed=0"]
    (cell,) = compose_cells([*one, *rows_of("out_of_the_box")[row]], multirun=True)
    assert cell.config.layout.pp is not None
