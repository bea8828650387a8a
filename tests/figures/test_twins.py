"""Gains on traces and on their twins: by seed, and how alike strategies rank."""

import numpy as np
import pandas as pd
import pytest

from entrain_bench.figures.twins import labels_of_traces, speedups

COLUMNS = ["strategy", "side", "seed", "iteration_time_s", "status"]


def runs(rows: list[tuple[str, str, int, float, str]]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=COLUMNS).assign(model="m", trace="t")


def test_gains_are_means_over_seeds_that_both_have() -> None:
    data = runs(
        [
            *[("base", side, seed, 2.0 + seed, "ok") for side in ("trace", "twin") for seed in (0, 1)],
            *[("a", "trace", seed, 1.0, "ok") for seed in (0, 1)],
            ("a", "twin", 0, 1.0, "ok"),
            ("a", "twin", 1, np.nan, "failed"),
        ]
    )
    table = speedups(data).set_index("strategy")
    assert table.loc["a", "trace_speedup"] == pytest.approx((2 + 3) / 2)
    assert table.loc["a", "twin_speedup"] == 2.0
    assert table.loc["base", ["trace_speedup", "twin_speedup"]].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("twin", "tau"), [([4.0, 2.0, 1.0], 1.0), ([4.0, 5.0, 6.0], -1.0), ([4.0, 1.0, 2.0], 1 / 3)])
def test_tau_is_that_of_the_order(twin: list[float], tau: float) -> None:
    names = ("base", "a", "b")
    rows = [(name, "trace", 0, seconds, "ok") for name, seconds in zip(names, (4.0, 2.0, 1.0), strict=True)]
    rows += [(name, "twin", 0, seconds, "ok") for name, seconds in zip(names, twin, strict=True)]
    assert speedups(runs(rows))["tau"].unique().tolist() == pytest.approx([tau])


def test_a_strategy_without_a_result_on_one_side_is_left_out() -> None:
    data = runs([(name, side, 0, 1.0, "ok") for name in ("base", "a") for side in ("trace", "twin")])
    data.loc[(data["strategy"] == "a") & (data["side"] == "twin"), "status"] = "failed"
    assert speedups(data)["strategy"].tolist() == ["base"]


def test_traces_have_the_labels_of_the_workloads_that_read_them() -> None:
    traces = ["coco_captions_val2017_by_image", "opencqa_ocr", "chartqa_test_by_image", "mine_2"]
    assert [*labels_of_traces(traces).values()] == ["COCO", "OpenCQA OCR", "ChartQA", "Mine 2"]
