"""What is made ready for an iteration while another runs: the program on every rank, the inputs of its forwards."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from entrain_bench.experiment import prepare
from entrain_bench.program import Pass
from entrain_bench.train import compose as compose_module
from entrain_bench.train import runtime as runtime_module
from entrain_bench.train.build import build_runtime
from entrain_bench.train.clock import Clock
from entrain_bench.train.compose import Composer
from entrain_bench.train.control import PlanningGroup
from entrain_bench.train.data import Inputs, SampleData
from entrain_bench.train.handover import config_from_json
from entrain_bench.train.loader import Loader
from entrain_bench.train.modules import Pack
from entrain_bench.train.platform import prepare_platform
from entrain_bench.train.routes import plan_rank
from entrain_bench.train.runtime import Runtime
from entrain_bench.train.step import TrainedStage
from support.parity import CPU, batch, configuration
from support.ranks import PRELOADED, run_ranks
from support.training import ONE_RANK

FOUR_STAGES = ("model=tiny", "strategy=entrain", "layout.tp=1", "layout.pp=4", "layout.dp=1", "global_batch=16")
TIMEOUT_S = 60.0

# --- Inputs.


def numbered(number: int) -> Inputs:
    return Inputs(Pack((number,)))


def settle(loader: Loader) -> None:
    """Wait until everything that has begun is done."""
    loader._pool.submit(lambda: None).result()


def test_inputs_come_in_order_and_only_so_many_ahead() -> None:
    begun: list[int] = []

    def maker(number: int) -> Callable[[], Inputs]:
        return lambda: (begun.append(number), numbered(number))[1]

    loader = Loader(CPU, ahead=2)
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
    inputs = Loader(CPU).load([lambda: numbered(0), Mock(side_effect=OSError("planted")), lambda: numbered(2)])
    assert next(inputs) == numbered(0)
    with pytest.raises(OSError, match="planted"):
        next(inputs)


def test_the_thread_pins_memory_for_the_gpu_of_its_rank() -> None:
    device = torch.device("cuda", 1)
    with patch.object(torch.cuda, "set_device") as choose:
        next(Loader(device).load([lambda: numbered(0)]))
    choose.assert_called_once_with(device)


def test_a_rank_is_given_the_data_of_its_forwards() -> None:
    setting = prepare(config_from_json(configuration(*FOUR_STAGES)))
    program = setting.strategy.program(batch(setting, 0), setting.strategy.plan(setting.profile), setting.profile)
    data, found = SampleData(program.shapes, 0, 1024), set()
    for rank in range(4):
        runtime = Runtime({}, Mock(), Mock(), torch.float32, CPU, 1024, 0, Loader(CPU))
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
                one_by_one = [data.features(module, members[i : i + 1]) for i in range(len(members))]
                assert torch.equal(inputs.features, torch.cat(one_by_one))
    assert found == {("vision", 0), ("vision", 1), ("llm", 0), ("llm", 1)}


def test_features_have_mean_0_and_variance_1_and_depend_on_sample_and_seed() -> None:
    setting = prepare(config_from_json(configuration(*FOUR_STAGES)))
    (module, _), shapes = setting.job.model.modules, batch(setting, 0)
    items = np.arange(shapes.num_items)
    features = SampleData(shapes, 0, 1024).features(module, items)
    assert features.dtype is torch.float32
    assert abs(float(features.mean())) < 0.02
    assert float(features.var()) == pytest.approx(1.0, rel=0.02)
    assert len(torch.unique(features)) > 0.9 * features.numel()
    assert not torch.equal(features, SampleData(shapes, 1, 1024).features(module, items))


# --- Programs.


@contextmanager
def composing(*programs: Any) -> Iterator[Composer]:
    """A composer whose programs are bytes, or what composing them raises or does."""
    plain = {"check_program": Mock(), "program_to_bytes": bytes, "program_from_bytes": lambda content, *_: content}
    made = iter(programs)

    def compose(*_: Any) -> bytes:
        program = next(made)
        return program() if callable(program) else program

    with patch.multiple(compose_module, **plain):
        yield Composer(
            Mock(strategy=Mock(program=compose)),
            Mock(),
            0,
            PlanningGroup(dist.group.WORLD, 60.0),
            lambda program: (program, "work"),
        )


def fail() -> bytes:
    raise ValueError("planted")


def _works(rank: int) -> list[Any]:
    with composing(b"first", b"second", fail) as composer:
        taken = [composer.take(iteration, last=False) for iteration in range(2)]
        assert all((composed.assignment_time_s > 0) == (rank == 0) for composed in taken)
        assert all(composed.exposed_s > 0 for composed in taken)
        try:
            composer.take(2, last=True)
        except Exception as error:
            return [*(composed.work for composed in taken), type(error).__name__]
    return []


def test_every_rank_prepares_the_program_of_rank_0_which_hears_why_there_is_none() -> None:
    first, second = run_ranks(_works, 2)
    assert first == [(b"first", "work"), (b"second", "work"), "ValueError"]
    # Nothing comes from rank 0 any more: its connection is gone.
    assert second == [*first[:2], "RuntimeError"]


def _ends(rank: int, store: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2)
    with composing(b"first", Event().wait) as composer:
        composer.take(0, last=False)
        if rank:
            sys.exit(3)
        Event().wait()


def test_a_rank_that_fails_ends_while_its_thread_waits_for_a_program(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ranks = [context.Process(target=_ends, args=(rank, tmp_path / "store"), daemon=True) for rank in range(2)]
    for rank in ranks:
        rank.start()
    try:
        ranks[1].join(TIMEOUT_S / 2)
        assert ranks[1].exitcode == 3
        assert ranks[0].is_alive()
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


# --- The host does not wait for the device.


class Reads(TorchDispatchMode):
    """Counts the numbers of computed tensors that the host asks for."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default and args[0].is_floating_point()
        return func(*args, **(kwargs or {}))


def _reads(_: int, config: str) -> int:
    prepare_platform()
    setting = prepare(config_from_json(config))
    layout = setting.strategy.plan(setting.profile)
    runtime = build_runtime(setting.job, layout, setting.executor, CPU, 0, dist.group.WORLD)
    work = runtime.prepare(setting.strategy.program(batch(setting, 0), layout, setting.profile))
    assert sum(step.kind is Pass.FORWARD for step in work.plan.steps) > 1
    # The optimizer counts its steps in tensors on the CPU.
    with patch.object(TrainedStage, "step"), Reads() as reads:
        runtime.run(work, Clock(CPU))
    return reads.count


def test_an_iteration_asks_the_device_for_the_gradient_norm_only() -> None:
    assert run_ranks(_reads, 1, configuration(*ONE_RANK)) == [1]
