"""Changes to a folder of results: six of them, ``N`` with ``make tamper``, as ``SEED`` draws them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .trial import Folder, problem_of

SEED = int(os.environ.get("SEED", "0"))
COUNTS = [int(os.environ.get("N", "6")), pytest.param(50, marks=pytest.mark.wide)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder.made(tmp_path_factory.mktemp("tamper") / "whole")


@pytest.mark.parametrize("count", COUNTS)
def test_no_change_is_shown_hidden_or_fatal(count: int, folder: Folder, tmp_path: Path) -> None:
    problems = [problem_of(folder, tmp_path / "changed", SEED, number) for number in range(count)]
    assert [problem for problem in problems if problem] == []
