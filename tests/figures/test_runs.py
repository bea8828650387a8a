"""Figures of run tables on made-up ones: the numbers they show, and runs without result."""

from __future__ import annotations

import math
from dataclasses import replace

import pandas as pd
import pytest

from entrain_bench.answers.tables import encoder_stages_and_gpus, relative_over_seeds
from entrain_bench.records.records import new_record
from entrain_bench.run.cells import compose_cells
from support.figures import MODELS, TRACES, drawn, errors, splits, table, warmups


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


def test_times_are_relative_to_those_without_error() -> None:
    _, shown, _ = drawn("misprediction", errors(["first"], TRACES[:1]))
    assert shown.groupby("belief_error")["relative"].unique().map(list).to_dict() == {
        0.0: [pytest.approx(1.0)],
        0.25: [pytest.approx(1.5)],
        0.5: [pytest.approx(2.0)],
    }


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


def test_numbers_of_forwards_stand_in_their_order_and_no_limit_comes_last() -> None:
    figure, shown, _ = drawn("warmup", warmups(["first"], TRACES[:1]).sample(frac=1.0, random_state=0))
    assert [text.get_text() for text in figure.axes[-1].get_xticklabels()] == ["0", "2", "16", "any"]
    rows = shown[shown["model"] == MODELS[0]].set_index("max_extra_forwards")
    assert rows["peak_memory_gib"].to_dict() == pytest.approx({"0": 5.0, "2": 7.0, "16": 13.0, "any": 13.0})
    seconds = rows["iteration_time_s"]
    assert seconds["2"] / seconds["0"] == pytest.approx(0.9)
