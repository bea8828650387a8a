"""What stands beside a figure: its command, and a caption with setting, seeds and cost source."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from entrain_bench.answers.labels import cost_source
from entrain_bench.figures._runner import Drawing, draw_figure, sidecar
from entrain_bench.figures._style import empty_figure
from entrain_bench.records.records import Results
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.study import Study


def test_a_caption_says_setting_seeds_and_cost_source() -> None:
    cells = compose_cells(["strategy=megatron", "layout.dp=4,null", "seed=0,1,2"], multirun=True)
    found = json.loads(sidecar("Some times.", "some command", cells))
    assert found["command"] == "some command"
    assert found["caption"].startswith(
        "Some times. Setting: cluster a40x64, harness simulate, global_batch 512, microbatch_size 4, layout.tp 2, "
        "layout.cp 1, layout.pp null, layout.dp 4 or null. Seeds: 0 to 2. Costs: fitted (a40x64); model error: "
    )
    assert found["setting"]["layout.dp"] == [4, None]
    assert (found["seeds"], found["cost_source"]) == ([0, 1, 2], {"a40x64": "fitted"})


@pytest.mark.wide
def test_every_figure_has_one_and_its_csv_stays_plain(tmp_path: Path) -> None:
    study = Study(Results(tmp_path))
    stub: Any = SimpleNamespace(
        EXPERIMENT="quick", RUNS=False, load=lambda *_: "none", draw=empty_figure, __doc__="Nothing.\n\nMore."
    )
    assert draw_figure(Drawing("stub", stub, {"": ("figure=quick",)}, ["figures", "stub"]), study) == ""
    found = json.loads((tmp_path / "figures" / "stub.json").read_text())
    assert found["command"] == "entrain-bench figures stub"
    assert found["caption"].startswith("Nothing. Setting: cluster a40x64,")
    assert pd.read_csv(tmp_path / "figures" / "stub.csv")["reason"].tolist() == ["none"]


def test_cost_sources_are_told_by_what_their_constants_stand_on() -> None:
    assert cost_source({"device": {"name": "A40"}}) == "fitted"
    assert cost_source({"device": {"name": "mine"}}) == "derived"
    assert cost_source({"device": {"path": "some.json"}}) == "profiled"
