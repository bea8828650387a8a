"""What tests of training share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from entrain_bench.train.modules import StageGroups
from support.train.modules import groups_of_one


@pytest.fixture(scope="module")
def alone() -> Iterator[StageGroups]:
    """Groups of one rank, this process."""
    with groups_of_one("gloo") as groups:
        yield groups
