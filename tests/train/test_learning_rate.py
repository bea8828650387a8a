"""Rates of a schedule by hand, and settings that make none."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from entrain_bench.base.errors import UserError
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import prepare
from entrain_bench.train.settings import TrainSettings


def rates(decay: str, **changes: Any) -> list[float]:
    truth = Mock(model=Mock(generators=()), cluster=Mock(num_ranks=4))
    given = {"learning_rate": 8.0, "min_learning_rate": 2.0, "warmup_iterations": 2} | changes
    settings = TrainSettings(truth, 1.0, learning_rate_decay=decay, **given)
    return [settings.rate_at(iteration, 6) for iteration in range(8)]


def test_rates_by_hand() -> None:
    assert rates("constant") == [4, 8, 8, 8, 8, 8, 8, 8]
    assert rates("linear") == pytest.approx([4, 8, 6.5, 5, 3.5, 2, 2, 2])
    # Half a cosine from iteration 1 to 5: 5 + 3 cos(pi k / 4).
    assert rates("cosine") == pytest.approx([4, 8, 5 + 3 * 0.5**0.5, 5, 5 - 3 * 0.5**0.5, 2, 2, 2])
    assert rates("linear", warmup_iterations=0) == pytest.approx([8, 6.8, 5.6, 4.4, 3.2, 2, 2, 2])
    assert rates("cosine", warmup_iterations=0, decay_iterations=1) == [8, 2, 2, 2, 2, 2, 2, 2]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["harness.learning_rate=-1"], "harness.learning_rate=-1: must be at least 0"),
        (["harness.min_learning_rate=1"], "harness.min_learning_rate=1: must be from 0 to learning_rate=0.001"),
        (["harness.warmup_iterations=-1"], "harness.warmup_iterations=-1"),
        (["harness.learning_rate_decay=sine"], "harness.learning_rate_decay=sine: unknown"),
        (["harness.warmup_iterations=5", "harness.decay_iterations=5"], "harness.decay_iterations=5: must be 0"),
        (["harness.betas=[0.9]"], r"harness.betas=\[0.9\]: must be two numbers from 0 to below 1"),
        (["harness.betas=[0.9,1]"], "harness.betas"),
        (["harness.epsilon=0"], "harness.epsilon=0"),
        (["harness.weight_decay=-0.1"], "harness.weight_decay=-0.1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(overrides: list[str], message: str) -> None:
    (cell,) = compose_cells(["harness=train", "model=tiny", "cluster=tiny", *overrides])
    with pytest.raises(UserError, match=message):
        prepare(cell.config)
