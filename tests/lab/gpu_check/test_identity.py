"""What makes results those of another check, and what does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from entrain_bench.lab.gpu_check import identity
from entrain_bench.lab.gpu_check.identity import identity_of, origin_of
from entrain_bench.lab.gpu_check.settings import Setup
from entrain_bench.records.code import Source
from support.gpu_check import machine

SETUP = Setup("cuda", 2, False, Path("here"), "origin")


def test_devices_options_and_tests_are_part_of_it(tmp_path: Path) -> None:
    test = tmp_path / "test_gpu.py"
    test.write_text("one")
    found = identity_of(SETUP, [test])
    assert identity_of(replace(SETUP, folder=Path("there")), [test]) == found
    others = [
        replace(SETUP, kind="cpu"),
        replace(SETUP, num_devices=4),
        replace(SETUP, everything=True),
        replace(SETUP, origin="other"),
    ]
    assert found not in [identity_of(other, [test]) for other in others]
    test.write_text("two")
    assert identity_of(SETUP, [test]) != found


def test_so_are_strategies_and_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is imported by what runs the steps."""
    found, sources_of = identity_of(SETUP, []), identity.sources_of

    def changed(modules: set[str]) -> Mapping[str, Any]:
        name = "entrain_bench_strategies.dip"
        sources = dict(sources_of(modules))
        assert any(module.startswith(name) for module in sources)
        return sources | {name: Source(Path(), "another")}

    monkeypatch.setattr(identity, "sources_of", changed)
    assert identity_of(SETUP, []) != found
    monkeypatch.undo()
    assert identity_of(SETUP, []) == found
    monkeypatch.setattr(identity, "config_tree", lambda: tmp_path)
    empty = identity_of(SETUP, [])
    (tmp_path / "mine.yaml").write_text("name: mine")
    assert len({found, empty, identity_of(SETUP, [])}) == 3


def test_measurements_are_of_a_machine_and_the_code_that_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    here = origin_of(machine())
    assert origin_of(machine()) == here
    assert origin_of(replace(machine(), identity={"variables": {"NCCL_P2P_DISABLE": "1"}})) != here
    assert replace(SETUP, origin="there").profile != SETUP.profile == SETUP.runs / "profile.json"
    monkeypatch.setattr(identity, "hash_of", lambda _: "other code")
    assert origin_of(machine()) != here
