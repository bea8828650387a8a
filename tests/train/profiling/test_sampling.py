"""Repetitions: how many are enough, and the interval of their median."""

import time

import numpy as np
import pytest
import torch

from entrain_bench.train.measuring.clock import Clock
from entrain_bench.train.profiling.sampling import WARM_UPS, Patience, precision_of, quantiles, sample

CPU = torch.device("cpu")


class Turns:
    """Takes the given seconds, the last of them again and again."""

    def __init__(self, *seconds: float) -> None:
        self.seconds, self.calls = seconds, 0

    def __call__(self, clock: Clock) -> None:
        wanted = self.seconds[min(self.calls, len(self.seconds) - 1)]
        self.calls += 1
        for part in range(2):
            with clock.action(part):
                time.sleep(wanted)


def test_the_interval_of_the_median_is_between_its_ranks() -> None:
    # Of 1 to 100 the ranks 50 -+ 9.8, rounded outwards: 41st to 61st value.
    assert precision_of(np.arange(1.0, 101)) == pytest.approx((61 - 41) / 2 / 50.5)
    assert precision_of(np.full(9, 2.0)) == 0.0


def test_equal_repetitions_are_enough_after_the_least_number() -> None:
    turns = Turns(0.002)
    rows = sample(turns, CPU, Patience(4, 50, 0.9, 10.0))
    assert rows.shape == (4, 2)
    assert turns.calls == WARM_UPS + 4
    assert (rows >= 0.002).all()


def test_unsteady_ones_are_repeated_to_the_most() -> None:
    turns = Turns(*[0.0001, 0.004] * 10)
    assert len(sample(turns, CPU, Patience(3, 9, 1e-6, 10.0))) == 9


def test_slow_ones_end_with_their_time_and_are_hardly_warmed_up() -> None:
    turns = Turns(0.03)
    rows = sample(turns, CPU, Patience(5, 50, 1e-6, 0.1))
    assert len(rows) <= 3
    assert turns.calls == 1 + len(rows)


def test_quantiles_of_repetitions() -> None:
    assert quantiles(np.arange(11.0)) == (1.0, 5.0, 9.0)
