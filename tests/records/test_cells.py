"""Keys of a sweep's cells: whatever decides a result gives other keys."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from entrain_bench.records.keys import identify
from entrain_bench.run.cells import compose_cells

pytestmark = pytest.mark.wide
SWEEP = ["model=tiny", "cluster=tiny,a40x16", "strategy=megatron,entrain", "seed=0,1"]


def keys(*overrides: str, config_dir: Path | None = None) -> list[str]:
    cells = compose_cells(overrides, config_dir and str(config_dir), multirun=True)
    assert [cell.key for cell in cells] == [identify(cell.config)[0] for cell in cells]
    return [cell.key for cell in cells]


def test_cells_of_a_sweep_have_keys_of_their_own_and_share_groups() -> None:
    cells = compose_cells(SWEEP, multirun=True)
    assert len({cell.key for cell in cells}) == 8
    assert cells[0].config.model is cells[1].config.model


def test_a_changed_yaml_gives_other_keys(tmp_path: Path) -> None:
    file = tmp_path / "mine" / "workload" / "theirs.yaml"
    file.parent.mkdir(parents=True)
    sweep, found = ("model=tiny", "workload=theirs", "seed=0,1"), []
    for share in (0.25, 0.75, 0.25):
        file.write_text(f"defaults: [uniform_mix, _self_]\nname: theirs\nvision_share: {share}\n")
        found.append(keys(*sweep, config_dir=file.parents[1]))
    before, after, back = found
    assert {*before}.isdisjoint(after)
    assert back == before


def test_a_changed_trace_gives_other_keys(tmp_path: Path) -> None:
    path, found = tmp_path / "mine.parquet", []
    for tokens in (100, 200):
        pd.DataFrame({"text_tokens": np.full(64, tokens, np.int32)}).to_parquet(path)
        found.append(keys("model=tiny", "workload=trace", f"workload.path={path}", "seed=0,1"))
    assert {*found[0]}.isdisjoint(found[1])


def test_what_follows_from_the_environment_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for name in ("one", "two"):
        monkeypatch.setenv("THEIR_NAME", name)
        (cell, _) = compose_cells(["model=tiny", "strategy.name=${oc.env:THEIR_NAME}", "seed=0,1"], multirun=True)
        found.append(cell.config.strategy["name"])
    assert found == ["one", "two"]
