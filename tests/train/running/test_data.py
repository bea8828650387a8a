"""Inputs of forwards: in order, made ahead, and of each rank's own samples."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from entrain_bench.balancing.recomputation import recompute_all
from entrain_bench.program import Pass, recompute_chunks
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import prepare
from entrain_bench.train.measuring import Clock
from entrain_bench.train.messages.rank_plan import plan_rank
from entrain_bench.train.modules.packing import Pack
from entrain_bench.train.running import runtime as runtime_module
from entrain_bench.train.running.data import (
    Inputs,
    MadeUp,
    SampleData,
    ThreadLoader,
)
from entrain_bench.train.running.runtime import Runtime
from entrain_bench.train.running.stages import TrainedStage
from support.builders import random_samples
from support.processes import eventually
from support.train.ranks import run_ranks
from support.train.runs import (
    CPU,
    DISJOINT,
    ONE_RANK,
    SETTING,
    build_here,
    config_from_json,
    configuration,
    features_of,
    program_of,
)


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


FOUR_STAGES = ("model=tiny", "strategy=entrain", "layout.tp=1", "layout.pp=4", "layout.dp=1", "global_batch=16")


@pytest.mark.wide
def test_a_rank_is_given_the_data_of_its_forwards_and_told_what_they_recompute() -> None:
    setting = prepare(config_from_json(configuration(*FOUR_STAGES)))
    plain = program_of(setting)
    # Another number for every chunk, so that none is taken for another.
    remade = [np.arange(own.size).reshape(own.shape) % (own + 1) for own in recompute_all(plain).remade]
    program = recompute_chunks(plain, remade)
    data = SampleData(program.shapes, MadeUp(0, 1024))
    seen = set()
    told = set()
    for rank in range(4):
        runtime = Runtime({}, Mock(), Mock(), torch.float32, CPU, lambda shapes: SampleData(shapes, MadeUp(0, 1024)))
        with patch.object(runtime_module.dist, "get_rank", lambda rank=rank: rank):
            work = runtime.prepare(program)
        forwards = [step for step in plan_rank(program, rank).steps if step.kind is Pass.FORWARD]
        assert len(forwards) > 4
        for step, inputs in zip(forwards, work.inputs, strict=True):
            module, stage = program.model.modules[step.place.module], step.place.stage
            members = np.array(program.view(step.action).members)
            seen.add((module.name, stage))
            told.add(inputs.pack.remade)
            assert inputs.pack.remade == remade[step.place.module][step.chunk, stage]
            pack = replace(inputs.pack, remade=0)
            if not module.is_encoder:
                wanted = data.llm_pack(members)
                assert torch.equal(pack.token_ids, wanted.token_ids)
                assert torch.equal(pack.labels, wanted.labels)
                continue
            assert pack == data.encoder_pack(members)
            features = inputs.features_on(CPU)
            assert (features is None) == bool(stage)
            if features is not None:
                one_by_one = [features_of(data, module, members[i : i + 1]) for i in range(len(members))]
                assert torch.equal(features, torch.cat(one_by_one))
    assert seen == {("vision", 0), ("vision", 1), ("llm", 0), ("llm", 1)}
    assert len(told) > 2


class Reads(TorchDispatchMode):
    """Counts the numbers of computed tensors that the host asks for."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default and args[0].is_floating_point()
        return func(*args, **(kwargs or {}))


def _reads(_: int, config: str) -> int:
    setting, runtime = build_here(config)
    work = runtime.prepare(program_of(setting))
    assert sum(step.kind is Pass.FORWARD for step in work.plan.steps) > 1
    # The optimizer counts its steps in tensors on the CPU.
    with patch.object(TrainedStage, "step"), Reads() as reads:
        runtime.run(work, Clock(CPU))
    return reads.count


@pytest.mark.wide
def test_an_iteration_asks_the_device_for_the_gradient_norm_only() -> None:
    assert run_ranks(_reads, 1, configuration(*ONE_RANK)) == [1]


def test_made_up_features_are_of_their_item_alone_and_have_mean_0_and_variance_1() -> None:
    (cell,) = compose_cells([*SETTING, *DISJOINT])
    vision = prepare(cell.config).job.model.encoders[0]
    data, other = (SampleData(random_samples(np.random.default_rng(0), 6), MadeUp(seed, 1024)) for seed in (0, 1))
    (items,) = np.nonzero(data.shapes.item_modality == 0)
    features = features_of(data, vision, items)
    assert torch.equal(features, torch.cat([features_of(data, vision, items[i : i + 1]) for i in range(len(items))]))
    assert not torch.equal(features, features_of(other, vision, items))
    assert len(features.unique(dim=0)) == len(features)
    assert float(features.mean()) == pytest.approx(0, abs=0.05)
    assert float(features.var()) == pytest.approx(1, abs=0.05)
