"""What a rank is given to run, and that its host does not wait for the device."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from entrain_bench.balancing.recomputation import recompute_all
from entrain_bench.program import Pass, recompute_chunks
from entrain_bench.run.experiment import prepare
from entrain_bench.train.measuring.clock import Clock
from entrain_bench.train.messages.rank_plan import plan_rank
from entrain_bench.train.running import runtime as runtime_module
from entrain_bench.train.running.data import Inputs, MadeUp, SampleData
from entrain_bench.train.running.loader import ThreadLoader
from entrain_bench.train.running.runtime import Runtime
from entrain_bench.train.running.step import TrainedStage
from support.train.handover import config_from_json
from support.train.ranks import run_ranks
from support.train.runs import CPU, ONE_RANK, batch, build_here, configuration, features_of, program_of

FOUR_STAGES = ("model=tiny", "strategy=entrain", "layout.tp=1", "layout.pp=4", "layout.dp=1", "global_batch=16")


def test_a_rank_is_given_the_data_of_its_forwards() -> None:
    setting = prepare(config_from_json(configuration(*FOUR_STAGES)))
    program = program_of(setting)
    data, found = SampleData(program.shapes, MadeUp(0, 1024)), set()
    for rank in range(4):
        runtime = Runtime({}, Mock(), Mock(), torch.float32, CPU, MadeUp(0, 1024), ThreadLoader(CPU))
        with patch.object(runtime_module.dist, "get_rank", lambda rank=rank: rank):
            work = runtime.prepare(program)
        forwards = [step for step in plan_rank(program, rank).steps if step.kind is Pass.FORWARD]
        assert len(forwards) > 4
        for step, inputs in zip(forwards, work.inputs, strict=True):
            module, stage = program.model.modules[step.place.module], step.place.stage
            members = np.array(program.view(step.action).members)
            found.add((module.name, stage))
            if not module.is_encoder:
                wanted = data.llm_pack(members)
                assert torch.equal(inputs.pack.token_ids, wanted.token_ids)
                assert torch.equal(inputs.pack.labels, wanted.labels)
            elif stage:
                assert inputs == Inputs(data.encoder_pack(members))
            else:
                assert inputs.pack == data.encoder_pack(members)
                one_by_one = [features_of(data, module, members[i : i + 1]) for i in range(len(members))]
                assert torch.equal(inputs.features_on(CPU, module), torch.cat(one_by_one))
    assert found == {("vision", 0), ("vision", 1), ("llm", 0), ("llm", 1)}


def test_a_rank_is_told_what_its_chunks_recompute() -> None:
    setting = prepare(config_from_json(configuration(*FOUR_STAGES)))
    plain = program_of(setting)
    most = recompute_all(plain).remade
    # Another number for every chunk, so that none is taken for another.
    wanted = [np.arange(own.size).reshape(own.shape) % (own + 1) for own in most]
    program, told = recompute_chunks(plain, wanted), set()
    for rank in range(4):
        runtime = Runtime({}, Mock(), Mock(), torch.float32, CPU, MadeUp(0, 1024), ThreadLoader(CPU))
        with patch.object(runtime_module.dist, "get_rank", lambda rank=rank: rank):
            work = runtime.prepare(program)
        forwards = [step for step in plan_rank(program, rank).steps if step.kind is Pass.FORWARD]
        for step, inputs in zip(forwards, work.inputs, strict=True):
            assert inputs.pack.remade == wanted[step.place.module][step.chunk, step.place.stage]
            told.add(inputs.pack.remade)
    assert len(told) > 2


def test_features_have_mean_0_and_variance_1_and_depend_on_sample_and_seed() -> None:
    setting = prepare(config_from_json(configuration(*FOUR_STAGES)))
    (module, _), shapes = setting.job.model.modules, batch(setting, 0)
    items = np.arange(shapes.num_items)
    features = features_of(SampleData(shapes, MadeUp(0, 1024)), module, items)
    assert features.dtype is torch.float32
    assert abs(float(features.mean())) < 0.02
    assert float(features.var()) == pytest.approx(1.0, rel=0.02)
    assert len(torch.unique(features)) > 0.9 * features.numel()
    assert not torch.equal(features, features_of(SampleData(shapes, MadeUp(1, 1024)), module, items))


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
