"""Figures of balancers and of parts: gains by hand, what is said of runs without result."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from entrain_bench.answers.labels import names
from entrain_bench.figures import ablation, out_of_the_box
from entrain_bench.figures._rows import rows_of
from entrain_bench.records.records import Results
from entrain_bench.run.cells import compose_cells
from support.figures import MODELS, TRACES, changes, combinations, drawn, table, written

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


def test_runs_without_result_are_named_in_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    states = {"first": "ok", "second": "failed", "third": "skipped"}
    data = pd.concat([table([*states], TRACES[:1], lambda name, _: states[name]).assign(row=row) for row in STACKS])
    shown = written(drawn("out_of_the_box", data).figure, monkeypatch)
    assert (shown.count("fails"), shown.count("-")) == (len(STACKS) * len(MODELS),) * 2


def test_a_seed_that_fails_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    data = changes(["arrival", "balanced"], TRACES[:1], STACKS)
    lost = (data["strategy"] == "balanced") & (data["seed"] == 2)
    some = data.assign(status=data["status"].mask(lost, "failed"))
    for runs, said in ((data, False), (some, True)):
        figure = drawn("out_of_the_box", runs).figure
        assert any(text.endswith("*") for text in written(figure, monkeypatch)) == said


@pytest.mark.parametrize("row", rows_of("out_of_the_box"))
def test_every_stack_composes(row: str) -> None:
    one = ["figure=out_of_the_box", "strategy=mdp", "workload=coco", "seed=0"]
    (cell,) = compose_cells([*one, *rows_of("out_of_the_box")[row]], multirun=True)
    assert cell.config.layout.pp is not None


def test_combinations_are_compared_with_the_first_of_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    data = combinations(TRACES[:2])
    found = ablation.gains(data).set_index([*ablation.PARTS, "workload"])
    # The fourth combination takes 1 / 1.15 of the first's time.
    assert found.loc[("entrain", "mdp", "megatron", TRACES[0]), "speedup"] == pytest.approx(1.15)
    assert found.loc[("megatron", "megatron", "megatron", TRACES[1]), "speedup"] == pytest.approx(1.0)
    assert found["speedup"].isna().sum() == 2 * (2 + 4)
    shown = written(drawn("ablation", data).figure, monkeypatch)
    assert shown.count("1.15") == 2
    assert {*names(data, "workload").values(), "hetero_colocated", "mdp"} < {*shown}


def test_parts_of_a_cell_are_its_choices(tmp_path: Path) -> None:
    few = [
        "strategy/planner=dflop",
        "strategy/assigner=entrain",
        "strategy/scheduler=entrain",
        "workload=coco",
        "seed=0",
    ]
    data = ablation.load(compose_cells(["figure=ablation", *few], multirun=True), Results(tmp_path))
    assert data[ablation.PARTS].to_numpy().tolist() == [["dflop", "entrain", "entrain"]]
