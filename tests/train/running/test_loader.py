"""Inputs are made in order: when they are taken, or ahead by a thread of the rank's own or by producers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from unittest.mock import Mock, patch

import pytest
import torch

from entrain_bench.train.modules import Pack
from entrain_bench.train.running.data import Inputs
from entrain_bench.train.running.loader import InlineLoader, ProducerLoader, ThreadLoader
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


def test_inline_inputs_are_made_when_they_are_taken() -> None:
    begun: list[int] = []
    inputs = InlineLoader(CPU).load(
        [lambda number=number: (begun.append(number), numbered(number))[1] for number in (5, 6)]
    )
    assert begun == []
    assert next(inputs) == numbered(5)
    assert begun == [5]
    assert [one.pack.lengths for one in inputs] == [(6,)]


def test_what_producers_made_is_pinned_for_a_gpu_by_a_thread() -> None:
    reader, main = Mock(), threading.current_thread()
    made = Inputs(Pack((2,)), torch.ones(2, 3)), numbered(1)
    reader.load.side_effect = lambda makers: iter(made[: len(makers)])
    pinned: list[threading.Thread] = []

    def pin(rows: torch.Tensor) -> torch.Tensor:
        pinned.append(threading.current_thread())
        return rows + 1

    with patch.object(torch.cuda, "set_device"), patch.object(torch.Tensor, "pin_memory", pin):
        first, second = ProducerLoader(reader, torch.device("cuda", 0)).load([Mock(), Mock()])
    assert torch.equal(first.features, torch.full((2, 3), 2.0))
    assert second == numbered(1)
    assert len(pinned) == 1
    assert pinned[0] is not main
    # On a CPU the memory is used as it is.
    assert next(ProducerLoader(reader, CPU).load([Mock()])) is made[0]
