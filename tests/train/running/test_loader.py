"""Inputs are made in order: when they are taken, or ahead by a thread of the rank's own or by producers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch

from entrain_bench.config.schema import RunConfig
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import prepare
from entrain_bench.train.messages.wire import from_bytes, to_bytes
from entrain_bench.train.modules import Pack
from entrain_bench.train.running.content import MadeUp
from entrain_bench.train.running.data import Inputs, SampleData
from entrain_bench.train.running.loader import InlineLoader, MakeInputs, ProducerLoader, ThreadLoader, makers_of_run
from support.builders import random_samples
from support.train.runs import CPU, DISJOINT, SETTING


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


class OwnProducer:
    """In place of a reader: makes at once what is asked for, all of which travels as bytes."""

    def __init__(self, config: RunConfig) -> None:
        self.makers_of = makers_of_run(config)

    def load(self, common: dict[str, Any], asked: list[Any]) -> Iterator[Any]:
        said = from_bytes(to_bytes({**common, "asked": asked}))
        return (from_bytes(to_bytes(make())) for make in self.makers_of(said))


def test_producers_make_what_ranks_would_and_a_thread_pins_it_for_a_gpu() -> None:
    (cell,) = compose_cells([*SETTING, *DISJOINT])
    setting = prepare(cell.config)
    batch = random_samples(np.random.default_rng(0), 6)
    batch = replace(batch, sample_names=np.array([f"sample {number}" for number in range(6)]))
    model = setting.job.model
    data = SampleData(batch, MadeUp(cell.config.seed, model.llm.config.vocab_size))
    (items,) = np.nonzero(batch.item_modality == 0)
    makers = [
        MakeInputs(data, module, stage, members, 1, True)
        for module, members in ((model.encoders[0], items), (model.llm, np.arange(6)))
        for stage in (0, 1)
    ]
    own = [maker() for maker in makers]
    found = list(ProducerLoader(OwnProducer(cell.config), CPU).load(makers))
    assert [repr(inputs) for inputs in found] == [repr(inputs) for inputs in own]
    assert found[0].row_keys is not None
    assert torch.equal(found[0].row_keys, own[0].row_keys)
    pinned: list[threading.Thread] = []

    def pin(rows: torch.Tensor) -> torch.Tensor:
        pinned.append(threading.current_thread())
        return rows + 1

    made = [
        {"pack": {"lengths": [2]}, "features": np.ones((2, 3), np.float32), "row_keys": None},
        {"pack": {"lengths": [1]}, "features": None, "row_keys": None},
    ]
    reader = Mock(load=lambda *_: iter(made))
    with patch.object(torch.cuda, "set_device"), patch.object(torch.Tensor, "pin_memory", pin):
        first, second = ProducerLoader(reader, torch.device("cuda", 0)).load(makers[:2])
    assert torch.equal(first.features, torch.full((2, 3), 2.0))
    assert second == numbered(1)
    assert len(pinned) == 1
    assert pinned[0] is not threading.current_thread()
