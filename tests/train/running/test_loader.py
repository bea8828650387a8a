"""Inputs are made in order: when they are taken, or ahead of that by a thread or by workers."""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from entrain_bench.base.errors import ExecutionError
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import prepare
from entrain_bench.train.modules import Pack
from entrain_bench.train.running.data import Inputs, MadeUp, SampleData
from entrain_bench.train.running.loader import InlineLoader, ThreadLoader, WorkerLoader
from support.builders import random_samples
from support.processes import eventually
from support.train.runs import CPU, DISJOINT, SETTING


class Numbered:
    """Data whose inputs are numbers; notes which were begun."""

    def __init__(self) -> None:
        self.begun: list[int] = []

    def inputs(self, number: int) -> Inputs:
        self.begun.append(number)
        if number < 0:
            raise OSError("planted")
        return Inputs(Pack((number,)))


def test_inputs_come_in_order_and_only_so_many_ahead() -> None:
    data: Any = Numbered()
    loader = ThreadLoader(CPU, ahead=2)
    first, second = (loader.load(data, [(number,) for number in numbers]) for numbers in (range(3), range(3, 6)))
    taken = []
    for inputs in (first, second):
        for _ in range(3):
            wanted = list(range(min(len(taken) + 2, 6)))
            assert eventually(lambda wanted=wanted: data.begun == wanted, 10.0)
            # No more than that.
            time.sleep(0.01)
            assert data.begun == wanted
            taken += next(inputs).pack.lengths
        assert next(inputs, None) is None
    assert taken == list(range(6))


def test_what_making_inputs_raises_reaches_who_takes_them() -> None:
    data: Any = Numbered()
    inputs = ThreadLoader(CPU).load(data, [(0,), (-1,), (2,)])
    assert next(inputs).pack.lengths == (0,)
    with pytest.raises(OSError, match="planted"):
        next(inputs)


def test_the_thread_pins_memory_for_the_gpu_of_its_rank() -> None:
    device = torch.device("cuda", 1)
    data: Any = Numbered()
    with patch.object(torch.cuda, "set_device") as choose:
        next(ThreadLoader(device).load(data, [(0,)]))
    choose.assert_called_once_with(device)


def test_inline_inputs_are_made_when_they_are_taken() -> None:
    data: Any = Numbered()
    inputs = InlineLoader(CPU).load(data, [(5,), (6,)])
    assert data.begun == []
    assert next(inputs).pack.lengths == (5,)
    assert data.begun == [5]
    assert [one.pack.lengths for one in inputs] == [(6,)]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_make_what_ranks_would(num_workers: int) -> None:
    (cell,) = compose_cells([*SETTING, *DISJOINT])
    model = prepare(cell.config).job.model
    batch = random_samples(np.random.default_rng(0), 6)
    data = SampleData(batch, MadeUp(cell.config.seed, model.llm.config.vocab_size))
    (items,) = np.nonzero(batch.item_modality == 0)
    requests = [
        (module, stage, members, 1, True)
        for module, members in ((model.encoders[0], items), (model.llm, np.arange(6)))
        for stage in (0, 1)
    ]
    loader = WorkerLoader(CPU, data.content, num_workers, timeout_s=60)
    # Inputs come in the order in which they are asked for.
    for asked in (requests, requests[::-1]):
        made = list(loader.load(data, asked))
        assert [repr(inputs) for inputs in made] == [repr(data.inputs(*request)) for request in asked]
    inputs = loader.load(data, [requests[0], (model.llm, 0, np.array([99])), requests[1]])
    assert repr(next(inputs)) == repr(data.inputs(*requests[0]))
    with pytest.raises(ExecutionError, match=r"^worker \d: IndexError: "):
        next(inputs)
