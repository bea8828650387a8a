"""Rankings under other modeling choices, and on traces and their twins: winners and correlations by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from entrain_bench.answers.tables import rankings
from entrain_bench.answers.twins import labels_of_traces, speedups
from entrain_bench.base.errors import UserError
from entrain_bench.config import figures as config_figures
from entrain_bench.config.figures import rows_of, sweeps_of
from entrain_bench.figures._runner import cells_of
from entrain_bench.records.records import Results
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.study import Study
from support.figures import MODELS

ROWS = rows_of("robustness")


def runs(row: str, **times: list[float]) -> pd.DataFrame:
    """Runs of strategies in one case, a seed a time; one that is 0 failed."""
    rows = [
        {
            "row": row,
            "strategy": name,
            "seed": seed,
            "iteration_time_s": time or None,
            "status": "ok" if time else "failed",
        }
        for name, each in times.items()
        for seed, time in enumerate(each)
    ]
    return pd.DataFrame(rows).assign(model="m", workload="w", reason="")


def test_winners_and_rank_correlations_by_hand() -> None:
    usual = runs("usual", a=[1.0, 1.1, 1.0], b=[2.0, 2.2, 2.1], c=[3.0, 3.3, 3.1])
    # At the first seed b and c change places (1 pair of 3), at the second nothing, at the third all is turned round.
    other = runs("other", a=[1.0, 1.1, 3.0], b=[3.0, 2.2, 2.0], c=[2.0, 3.3, 1.0])
    found = rankings(pd.concat([usual, other], ignore_index=True)).set_index(["row", "model"])
    assert found.loc[("usual", "m"), ["tau", "tau_low", "tau_high"]].tolist() == [1.0, 1.0, 1.0]
    assert found.loc[("other", "m"), "tau"] == pytest.approx((1 / 3 + 1 - 1) / 3)
    assert found.loc[("other", "m"), ["tau_low", "tau_high"]].tolist() == [-1.0, 1.0]
    assert (
        found.loc[("other", "all"), ["tau", "tau_low"]].tolist()
        == found.loc[("other", "m"), ["tau", "tau_low"]].tolist()
    )
    # Faster on average, but not at every seed: three of them cannot tell.
    assert found.loc[("other", "m"), ["winner", "firm"]].tolist() == ["a", True]


def test_a_winner_that_is_significantly_slower_is_not_firm() -> None:
    usual = runs("usual", a=[1.0, 1.1, 1.2], b=[2.0, 2.1, 2.2])
    other = runs("other", a=[2.0, 2.1, 2.2], b=[1.0, 1.1, 1.2])
    fails = runs("fails", a=[1.0, 0.0, 1.2], b=[2.0, 2.1, 2.2])
    nothing = runs("nothing", a=[0.0, 0.0, 0.0], b=[0.0, 0.0, 0.0])
    found = rankings(pd.concat([usual, other, fails, nothing], ignore_index=True))
    found = found[found["model"] == "m"].set_index("row")
    assert found["winner"].to_dict() == {"usual": "a", "other": "b", "fails": "b", "nothing": ""}
    assert found["firm"].to_dict() == {"usual": True, "other": False, "fails": False, "nothing": False}
    # What failed comes last: at one seed of three the order is turned round.
    assert found["tau"].to_dict() == pytest.approx({"usual": 1.0, "other": -1.0, "fails": 1 / 3, "nothing": 0.0})
    assert found["num_ok"].to_dict() == {"usual": 6, "other": 6, "fails": 5, "nothing": 0}


@pytest.mark.wide
@pytest.mark.parametrize("row", ROWS)
def test_every_row_composes_and_is_another_run(row: str) -> None:
    one = ("figure=robustness", "strategy=megatron", "workload=coco", f"model={MODELS[0]}", "cluster=a40x64", "seed=0")
    (cell,) = compose_cells([*one, *ROWS[row]], multirun=True)
    (usual,) = compose_cells(one, multirun=True)
    assert (cell.key == usual.key) == (row == next(iter(ROWS)))


def test_a_figure_has_a_sweep_for_each_of_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sweeps_of("iteration_time") == {"": ("figure=iteration_time",)}
    assert sweeps_of("robustness") == {row: ("figure=robustness", *overrides) for row, overrides in ROWS.items()}
    study: Any = Study(Results(tmp_path))
    monkeypatch.setattr(Study, "cells", lambda _, *sweep: sweep)
    assert cells_of(sweeps_of("iteration_time"), study) == ("figure=iteration_time",)
    assert cells_of(sweeps_of("robustness"), study) == {row: ("figure=robustness", *each) for row, each in ROWS.items()}
    (tmp_path / "figure").mkdir()
    (tmp_path / "figure" / "mine.yaml").write_text("figure: {rows: {some: speed.gemm=2}}")
    monkeypatch.setattr(config_figures, "config_tree", lambda: tmp_path)
    with pytest.raises(UserError, match=r"figure.rows.some=speed.gemm=2: must be a list of overrides"):
        rows_of("mine")


COLUMNS = ["strategy", "side", "seed", "iteration_time_s", "status"]


def both_sides(rows: list[tuple[str, str, int, float, str]]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=COLUMNS).assign(model="m", trace="t")


def test_gains_are_means_over_seeds_that_both_have() -> None:
    data = both_sides(
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
    assert speedups(both_sides(rows))["tau"].unique().tolist() == pytest.approx([tau])


def test_a_strategy_without_a_result_on_one_side_is_left_out() -> None:
    data = both_sides([(name, side, 0, 1.0, "ok") for name in ("base", "a") for side in ("trace", "twin")])
    data.loc[(data["strategy"] == "a") & (data["side"] == "twin"), "status"] = "failed"
    assert speedups(data)["strategy"].tolist() == ["base"]


def test_traces_have_the_labels_of_the_workloads_that_read_them() -> None:
    traces = ["coco_captions_val2017_by_image", "opencqa_ocr", "chartqa_test_by_image", "mine_2"]
    assert [*labels_of_traces(traces).values()] == ["COCO", "OpenCQA OCR", "ChartQA", "Mine 2"]
