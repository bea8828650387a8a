"""Programs made ahead on every rank, and what can go wrong in an iteration: one line each, weights left alone."""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from entrain_bench.base.errors import ExecutionError, IncompatibleError, OutOfMemoryError
from entrain_bench.run.experiment import Feed, prepare
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.train import loop
from entrain_bench.train.device import prepare_platform
from entrain_bench.train.loop import WorkFeed
from entrain_bench.train.measuring import OF_THE_CLUSTER, Clock
from entrain_bench.train.messages.control import PlanningGroup, planning_group
from entrain_bench.train.modules.stage import Stage
from entrain_bench.train.running.data import Inputs, SampleData
from entrain_bench.train.running.runtime import build_runtime
from support.train.modules import small_model
from support.train.ranks import PRELOADED, run_ranks
from support.train.runs import CPU, DISJOINT, ONE_RANK, batch, config_from_json, configuration, run_here, train_here

TIMEOUT_S = 60.0


@contextmanager
def feeding(*programs: Any) -> Iterator[WorkFeed]:
    """A feed whose programs are bytes, or what making them raises or does."""
    # Only rank 0 knows the order.
    plain = {
        "check_program": Mock(),
        "believed_order": lambda program, _: np.arange(len(program)) if dist.get_rank() == 0 else None,
    }
    made = iter(programs)

    def make(*_: Any) -> bytes:
        program = next(made)
        return program() if callable(program) else program

    with patch.multiple(loop, **plain):
        setting: Any = Mock(strategy=Mock(program=make))
        planning = PlanningGroup(dist.group.WORLD, 60.0)
        yield WorkFeed(Feed(setting, Mock(), 0), planning, lambda program, order: (program, order.tolist()))


def fail() -> bytes:
    raise ValueError("planted")


def _works(_: int) -> list[Any]:
    with feeding(b"first", b"second", fail) as feed:
        taken = [feed.take(iteration, last=False) for iteration in range(2)]
        assert all(exposed_s > 0 for *_, exposed_s in taken)
        try:
            feed.take(2, last=True)
        except Exception as error:
            return [*(work for work, *_ in taken), type(error).__name__]
    return []


@pytest.mark.wide
def test_every_rank_prepares_the_program_of_rank_0_which_hears_why_there_is_none() -> None:
    first, second = run_ranks(_works, 2, stay=False)
    assert first == [(b"first", [*range(5)]), (b"second", [*range(6)]), "ValueError"]
    # Nothing comes from rank 0 any more: its connection is gone.
    assert second == [*first[:2], "RuntimeError"]


def _ends(rank: int, store: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2)
    with feeding(b"first", Event().wait) as feed:
        feed.take(0, last=False)
        if rank:
            sys.exit(3)
        Event().wait()


@pytest.mark.wide
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


class Spy:
    """A strategy that notes what programs it made after which observations."""

    def __init__(self, real: Any, seen: tuple[str, ...], log: list[tuple[str, ...]]) -> None:
        self.real, self.seen, self.log = real, seen, log

    def observe(self, timeline: str, _: object) -> Spy:
        return Spy(self.real, (*self.seen, timeline), self.log)

    def program(self, *args: Any) -> Any:
        self.log.append(self.seen)
        return self.real.program(*args)


def test_a_strategy_observes_what_the_simulator_would_show_it() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        setting = prepare(config_from_json(configuration(*DISJOINT)))
        layout = setting.strategy.plan(setting.profile)
        log: list[tuple[str, ...]] = []
        spied: Any = replace(setting, strategy=Spy(setting.strategy, (), log))
        feed = WorkFeed(Feed(spied, layout, 0), PlanningGroup(dist.group.WORLD, 60.0), Mock())
        for iteration in range(5):
            feed.take(iteration, last=iteration == 4)
            observed: Any = f"t{iteration}"
            feed.observe(observed)
    finally:
        dist.destroy_process_group()
    assert log == [(), (), ("t0",), ("t0", "t1"), ("t0", "t1", "t2")]


@contextmanager
def poisoned(bad: Callable[[SampleData], bool]) -> Iterator[None]:
    """Features of some batches are not numbers."""
    inputs = SampleData.inputs

    def spoil(data: SampleData, module: ModuleSpec, *args: Any, **options: Any) -> Inputs:
        found = inputs(data, module, *args, **options)
        features = found.features_on(CPU)
        return found if features is None or not bad(data) else Inputs(found.pack, features * float("nan"))

    with patch.object(SampleData, "inputs", spoil):
        yield


def _non_finite(rank: int, config: str) -> str:
    prepare_platform()
    setting, control = prepare(config_from_json(config)), dist.group.WORLD
    planning = planning_group(60.0)
    layout, _seconds = loop.plan(setting, planning)
    runtime = build_runtime(layout, setting.executor, CPU, 0, control)
    second = batch(setting, 1).sample_ids.tolist()
    with poisoned(lambda data: data.shapes.sample_ids.tolist() == second):
        feed = WorkFeed(Feed(setting, layout, 0), planning, runtime.prepare)
        works = [feed.take(iteration, last=iteration == 2)[0] for iteration in range(3)]
        weights = [p for trained in runtime.stages.values() for p in trained.stage.parameters()]
        runtime.run(works[0], Clock(CPU))
        for trained in runtime.stages.values():
            trained.gather_weights()
        before = [p.detach().clone() for p in weights]
        assert not isfinite(runtime.run(works[1], Clock(CPU)).grad_norm)
        assert all(torch.equal(p, old) for p, old in zip(weights, before, strict=True)), "weights changed"
        assert runtime.run(works[2], Clock(CPU)).grad_norm > 0
        for trained in runtime.stages.values():
            trained.gather_weights()
        assert not any(torch.equal(p, old) for p, old in zip(weights, before, strict=True) if p.dim() > 1)
        skipping = json.loads(config)
        skipping["harness"]["on_non_finite"] = "skip"
        rows = train_here(json.dumps(skipping))
        assert rank or [row["skipped_updates"] for row in rows] == [0.0, 1.0, 0.0]
        try:
            train_here(config)
        except ExecutionError as error:
            return str(error)
    return "went on"


@pytest.mark.wide
def test_a_loss_that_is_not_finite_stops_or_skips_the_update() -> None:
    config = configuration(*DISJOINT, "iterations=3", "distributed_optimizer=true")
    for line in run_ranks(_non_finite, 4, config):
        assert line.startswith("loss=nan in iteration 1, microbatch ")
        assert "(samples " in line


def _out_of_memory(_: int, config: str) -> str:
    forward = Stage.forward

    def fail(stage: Stage, *args: Any) -> torch.Tensor:
        if not stage.module.is_encoder:
            raise torch.OutOfMemoryError("planted")
        return forward(stage, *args)

    try:
        with patch.object(Stage, "forward", fail):
            train_here(config)
    except OutOfMemoryError as error:
        return str(error)
    return "went on"


@pytest.mark.wide
def test_out_of_memory_names_the_action_and_its_bytes() -> None:
    (line,) = run_ranks(_out_of_memory, 1, configuration(*ONE_RANK))
    assert line.startswith("memory: rank 0 ran out of memory at forward of llm microbatch 0 on stage 0 of replica 0")
    assert "predicted need: 0." in line


def _execution(_: int, config: str) -> tuple[dict[str, str], tuple[str, ...], set[str]]:
    outcome = run_here(config)
    assert outcome is not None
    return dict(outcome.execution), outcome.remarks, {*outcome.metrics}


@pytest.mark.wide
def test_a_run_says_what_it_ran_with_and_why_it_has_no_mfu() -> None:
    small = ("global_batch=2", "microbatch_size=1", "iterations=1")
    ((said, remarks, metrics),) = run_ranks(_execution, 1, configuration(*ONE_RANK, *small))
    assert said == {
        "device": loop.device_name(CPU),
        "device_type": "cpu",
        "dtype": "float32",
        "torch": torch.__version__,
        "megatron_core": version("megatron-core"),
        "attention.vision": "cpu",
        "attention.llm": "cpu",
    }
    (line,) = remarks
    assert line.startswith("mfu, bounds and shares of time are left out: ranks compute on a CPU")
    assert metrics.isdisjoint(OF_THE_CLUSTER)


def test_ranks_that_differ_are_all_named() -> None:
    def everyone(own: dict[str, str], _: Any) -> list[dict[str, str]]:
        other = own | {"device": "another", "attention.llm": "flash2"}
        return [own, other, other]

    with patch.object(loop, "gather_values", everyone):
        said = loop.ran_with(small_model(), CPU, torch.float32, Mock())
    assert said["device"] == f"{loop.device_name(CPU)} and another"
    assert said["attention.llm"] == "cpu and flash2"
    assert said["dtype"] == "float32"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("", "layout.vision.offload: harness=train cannot offload weights"),
        ("encoder_cp=false", "encoder_cp=false: must be true with harness=train .vision, cp=2"),
        ("encoder_optimizers=2", "encoder_optimizers=2: must be 1 with harness=train"),
    ],
)
def test_what_is_only_simulated_is_refused(setting: str, message: str) -> None:
    config = configuration("model=tiny", "strategy=megatron", "layout.tp=1", "layout.cp=2", *filter(None, [setting]))
    context = prepare(config_from_json(config))
    layout = context.plan()
    vision, llm = layout.modules
    layout = replace(layout, modules=(replace(vision, offload=not setting), llm))
    settings: Any = context.executor
    with pytest.raises(IncompatibleError, match=message):
        build_runtime(layout, settings, CPU, 0, Mock())
