"""What tests of training share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from entrain_bench.train.modules.packing import StageGroups
from support.train.modules import groups_of_one
from support.train.ranks import start_server


@pytest.fixture(scope="module")
def alone() -> Iterator[StageGroups]:
    """Groups of one rank, this process."""
    with groups_of_one("gloo") as groups:
        yield groups


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where launchers make their temporary folders; ranks fork from the tests' server."""
    start_server()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path
