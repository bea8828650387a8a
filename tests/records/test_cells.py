"""Cells of a sweep: what is known of an earlier process gives the same keys, and whatever decides gives others."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from entrain_bench.config.compose import Composer
from entrain_bench.config.targets import trust
from entrain_bench.records.keys import identify
from entrain_bench.run.cells import compose_cells

# Each composes with a store of its own, which takes seconds.
pytestmark = pytest.mark.wide
SWEEP = ["model=tiny", "cluster=tiny,a40x16", "strategy=megatron,entrain", "seed=0,1"]
PART = "class Mine:\n    {}\n"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def composed(monkeypatch: pytest.MonkeyPatch, *overrides: str, config_dir: Path | None = None) -> tuple[list[str], int]:
    """Keys of a sweep's cells, and how many runs were composed for them."""
    count, original = 0, Composer._choices

    def counted(self: Composer, *given: Any) -> dict[str, object]:
        nonlocal count
        count += 1
        return original(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Composer, "_choices", counted)
        cells = compose_cells(overrides, config_dir and str(config_dir), multirun=True)
    assert [cell.key for cell in cells] == [identify(cell.config)[0] for cell in cells]
    return [cell.key for cell in cells], count


def test_a_second_process_composes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first = compose_cells(SWEEP, multirun=True)
    again = compose_cells(SWEEP, multirun=True)
    assert again == first
    assert composed(monkeypatch, *SWEEP) == ([cell.key for cell in first], 0)
    assert len({cell.key for cell in first}) == 8
    assert again[0].config.model is again[1].config.model


def test_a_changed_yaml_gives_other_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine" / "workload" / "theirs.yaml"
    file.parent.mkdir(parents=True)
    sweep, found = ("model=tiny", "workload=theirs", "seed=0,1"), []
    for share in (0.25, 0.75, 0.25):
        file.write_text(f"defaults: [uniform_mix, _self_]\nname: theirs\nvision_share: {share}\n")
        found.append(composed(monkeypatch, *sweep, config_dir=file.parents[1]))
    (before, _), (after, _), (back, asked) = found
    assert {*before}.isdisjoint(after)
    assert (back, asked) == (before, 0)


def test_changed_code_gives_other_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    trust(tmp_path)
    module = tmp_path / "their_assigner.py"
    sweep, found = ("model=tiny", "strategy.assigner._target_=their_assigner.Mine", "seed=0,1"), []
    from entrain_bench.records import code

    for body in ("pass", "x = 1", '"""Words alone."""\n    x = 1'):
        module.write_text(PART.format(body))
        code.code_version.cache_clear()
        found.append(composed(monkeypatch, *sweep))
    (before, _), (after, asked), (worded, _) = found
    assert {*before}.isdisjoint(after)
    assert asked == 0, "the composition is the same"
    assert worded == after


def test_a_changed_trace_gives_other_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, found = tmp_path / "mine.parquet", []
    for tokens in (100, 200):
        pd.DataFrame({"text_tokens": np.full(64, tokens, np.int32)}).to_parquet(path)
        found.append(composed(monkeypatch, "model=tiny", "workload=trace", f"workload.path={path}", "seed=0,1"))
    assert {*found[0][0]}.isdisjoint(found[1][0])
    assert found[1][1] == 0


def test_what_follows_from_the_environment_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for name in ("one", "two"):
        monkeypatch.setenv("THEIR_NAME", name)
        (cell, _) = compose_cells(["model=tiny", "strategy.name=${oc.env:THEIR_NAME}", "seed=0,1"], multirun=True)
        found.append(cell.config.strategy["name"])
    assert found == ["one", "two"]


def test_a_damaged_store_costs_time_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = ("model=tiny", "seed=0,1")
    keys, _ = composed(monkeypatch, *sweep)
    for file in (tmp_path / "cache" / "entrain-bench").glob("*.json"):
        file.write_text(file.read_text()[:-20])
    assert composed(monkeypatch, *sweep) == (keys, 2)
