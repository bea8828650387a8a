"""Inputs are made ahead, in order, by a thread of the rank's own."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import Mock, patch

import pytest
import torch

from entrain_bench.train.modules import Pack
from entrain_bench.train.running.data import Inputs
from entrain_bench.train.running.loader import ThreadLoader
from support.train.runs import CPU


def numbered(number: int) -> Inputs:
    return Inputs(Pack((number,)))


def settle(loader: ThreadLoader) -> None:
    """Wait until everything that has begun is done."""
    loader._pool.submit(lambda: None).result()


def test_inputs_come_in_order_and_only_so_many_ahead() -> None:
    begun: list[int] = []

    def maker(number: int) -> Callable[[], Inputs]:
        return lambda: (begun.append(number), numbered(number))[1]

    loader = ThreadLoader(CPU, ahead=2)
    first, second = (loader.load([maker(number) for number in numbers]) for numbers in (range(3), range(3, 6)))
    taken = []
    for inputs in (first, second):
        for _ in range(3):
            settle(loader)
            assert begun == list(range(min(len(taken) + 2, 6)))
            taken += next(inputs).pack.lengths
        assert next(inputs, None) is None
    assert taken == list(range(6))


def test_what_making_inputs_raises_reaches_who_takes_them() -> None:
    inputs = ThreadLoader(CPU).load([lambda: numbered(0), Mock(side_effect=OSError("planted")), lambda: numbered(2)])
    assert next(inputs) == numbered(0)
    with pytest.raises(OSError, match="planted"):
        next(inputs)


def test_the_thread_pins_memory_for_the_gpu_of_its_rank() -> None:
    device = torch.device("cuda", 1)
    with patch.object(torch.cuda, "set_device") as choose:
        next(ThreadLoader(device).load([lambda: numbered(0)]))
    choose.assert_called_once_with(device)
