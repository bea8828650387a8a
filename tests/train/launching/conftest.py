"""What tests of launchers share."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from support.train.ranks import start_server


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where launchers make their temporary folders; ranks fork from the tests' server."""
    start_server()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path
