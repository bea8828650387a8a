"""Modules of different degrees on eight ranks train like one process: those of megatron-core's bridge tests, and CP."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.train.eight_ranks import CASES, RANKS, configuration_of
from support.train.parity import compare, train_reference
from support.train.ranks import run_ranks
from support.train.runs import configuration

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("eight") / "reference.npz"
    run_ranks(train_reference, 1, configuration("model=tiny"), path)
    return path


def errors(case: str, change: str, reference: Path) -> list[dict[str, float]]:
    """What every rank found."""
    found = [own for (own,) in run_ranks(compare, RANKS, [(configuration_of(case), change)], reference, stay=False)]
    assert all(isinstance(own, dict) for own in found), found
    return found


@pytest.mark.parametrize("case", CASES)
def test_degrees_of_their_own_train_like_one_process(case: str, reference: Path) -> None:
    for found in errors(case, "", reference):
        assert found["gradient"] <= 1, case
        assert found["weight"] <= 1, case
        assert found["loss"] <= 1e-5, case
        assert found["norm"] <= 1e-4, case


@pytest.mark.parametrize("case", ["tp2_dp2_to_tp4_dp1", "colocated_tp4_dp2_to_tp2_dp4"])
def test_rows_in_another_order_are_noticed(case: str, reference: Path) -> None:
    assert max(found["gradient"] for found in errors(case, "reversed_rows", reference)) > 1
