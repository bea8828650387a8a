"""Programs whose passes this machine measured, on the simulated clock."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from entrain_bench.balancing.recomputation import recompute_all
from entrain_bench.base.errors import IncompatibleError, OutOfMemoryError, UserError
from entrain_bench.config.tree import choices
from entrain_bench.program import Pass, Program
from entrain_bench.run.cells import compose_cells
from entrain_bench.run.experiment import RunContext, prepare, run_experiment
from entrain_bench.simulate import Simulator
from entrain_bench.train.emulate import Emulator, bench, lane_orders, pass_keys, step_keys
from entrain_bench.train.modules.packing import Pack, StageGroups
from entrain_bench.train.modules.stage import Stage
from support.train.runs import program_of
from support.train.widths import HALVED, SLICED
from support.wide import wide_unless

# Samples of one length, and few layers: two passes a stage to measure.
# In every run of the tests; the others are for make test-slow.
USUAL = ("megatron", "dip", "hetero_noncolocated")
UNIFORM = (
    "harness=emulate",
    "harness.dtype=float32",
    "harness.device=cpu",
    "harness.num_warm_ups=0",
    "harness.num_repetitions=1",
    "model=tiny",
    "model.modules.vision.num_layers=2",
    "model.modules.vision.full_attention_layers=[1]",
    "model.modules.llm.num_layers=2",
    "cluster=tiny",
    "workload=uniform",
    "workload.text=16",
    "workload.modalities.image.llm_tokens=8",
    "global_batch=8",
    "microbatch_size=2",
    "layout.tp=null",
    "layout.dp=null",
    "iterations=1",
)


def setting_of(*overrides: str) -> RunContext:
    return prepare(compose_cells([*UNIFORM, *overrides])[0].config)


def emulated(*overrides: str) -> tuple[Emulator, Program]:
    setting = setting_of(*overrides)
    assert isinstance(setting.executor, Emulator)
    return setting.executor, program_of(setting)


@pytest.mark.wide
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(name, marks=wide_unless(name == USUAL[0]) if name in USUAL else [pytest.mark.slow])
        for name in choices("strategy")
    ],
)
def test_every_strategy_is_emulated(strategy: str) -> None:
    # With all ranks in tensor parallelism nothing is left for stages of encoders and of the LLM.
    degrees = ["layout.tp=2", "layout.pp=2"] if strategy == "megatron_rigid" else []
    (cell,) = compose_cells([*UNIFORM, f"strategy={strategy}", *degrees])
    outcome = run_experiment(cell.config)
    assert outcome.metrics["iteration_time_s"] > 0
    assert outcome.metrics["peak_memory_bytes"] > 0
    assert not dist.is_initialized()


def test_measured_seconds_take_the_place_of_modelled_computation_alone() -> None:
    emulator, program = emulated("strategy=megatron", "layout.tp=2", "layout.pp=2")
    modelled = emulator.truth.price(program)
    # As if every pass had been measured: a backward takes twice its forward.
    seconds = {key: 1.0 + program.kind[action] for action, key in pass_keys(program).items()}
    emulator.measured_s.update(seconds | dict.fromkeys(step_keys(program).values(), 7.0))
    prices = emulator.price(program)
    passes = program.kind <= Pass.BACKWARD
    expected = np.where(program.kind == Pass.FORWARD, 1.0, 2.0) + modelled.comm_s
    np.testing.assert_allclose(prices.duration_s[passes], expected[passes])
    assert np.all(prices.duration_s[~passes] == 0)
    np.testing.assert_allclose(prices.steps.optimizer_s, 7.0)
    kept = [name.name for name in dataclasses.fields(prices) if name.name not in ("duration_s", "steps", "transfers")]
    for name in kept:
        np.testing.assert_array_equal(getattr(prices, name), getattr(modelled, name))
    timeline, simulated = emulator.execute(program), Simulator(emulator.truth, 1e12).execute(program)
    np.testing.assert_array_equal(timeline.peak_memory_bytes, simulated.peak_memory_bytes)
    assert timeline.iteration_time_s > simulated.iteration_time_s


@pytest.mark.wide
def test_what_is_alike_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator, program = emulated("strategy=megatron", "layout.tp=1", "layout.dp=2", "layout.pp=2")
    emulator.execute(program)
    num_stages = sum(placed.pp for placed in program.layout.modules)
    # A forward, a backward and a step.
    assert len(emulator.measured_s) == 3 * num_stages
    assert sum(len(chunks) for chunks in program.chunks) > num_stages

    def measure(*_: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(bench, "measure_rank", measure)
    again = emulator.execute(program)
    assert again.iteration_time_s == emulator.execute(program).iteration_time_s


@pytest.mark.wide
@pytest.mark.parametrize("schedule", ["zb_h1", pytest.param("zb_v", marks=pytest.mark.slow)])
def test_weight_passes_are_measured_apart(schedule: str) -> None:
    v = ["strategy/planner=megatron_schedules", "strategy.planner.schedules=[zb_v]"] if schedule == "zb_v" else []
    given = (f"strategy/scheduler={schedule}", "layout.tp=1", "layout.dp=2", "layout.pp=2", *v)
    emulator, program = emulated("strategy=megatron", "model.modules.llm.num_layers=6", *given)
    timeline = emulator.execute(program)
    passes = program.is_pass
    assert (program.kind == Pass.WEIGHT).any()
    assert np.all((timeline.end_s > timeline.start_s)[passes])
    # What is known of whole backwards says nothing of split ones.
    _, unsplit = emulated("strategy=megatron", "model.modules.llm.num_layers=6", *given[1:4])
    assert not emulator.measured_s.keys() & {*pass_keys(unsplit).values()}


def test_lanes_keep_the_order_of_a_timeline() -> None:
    emulator, program = emulated("strategy=megatron", "layout.tp=1", "layout.dp=2", "layout.pp=2")
    timeline = Simulator(emulator.truth, 1e12).execute(program)
    orders = lane_orders(program)
    passes = np.flatnonzero(program.kind <= Pass.BACKWARD)
    assert set(np.concatenate([order.actions for order in orders]).tolist()) == set(passes.tolist())
    assert all(np.all(np.diff(timeline.start_s[order.actions]) >= 0) for order in orders)


@pytest.mark.wide
def test_what_does_not_fit_the_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator, program = emulated("strategy=megatron", "layout.tp=1", "layout.dp=4")

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(bench.Iteration, "_start", full)
    with pytest.raises(OutOfMemoryError, match=r"ran out of memory in forward of \w+ microbatch 0 on stage 0"):
        emulator.execute(program)
    assert not dist.is_initialized()


@pytest.mark.wide
@pytest.mark.parametrize("split", [False, True])
def test_chunks_are_measured_in_their_groups_and_with_what_they_recompute(
    monkeypatch: pytest.MonkeyPatch, split: bool
) -> None:
    emulator, program = emulated(*(HALVED if split else SLICED), "microbatch_size=1")
    ran: dict[tuple[str, int], set[tuple[int, int, int]]] = defaultdict(set)
    forward = Stage.forward

    def watched(stage: Stage, hidden: Any, pack: Pack, groups: StageGroups | None = None) -> Any:
        degrees = stage.config.tensor_model_parallel_size, (groups or stage.groups).cp.size()
        ran[stage.module.name, sum(pack.lengths)].add((*degrees, pack.remade))
        return forward(stage, hidden, pack, groups)

    monkeypatch.setattr(Stage, "forward", watched)
    wanted: dict[tuple[str, int], set[tuple[int, int, int]]] = defaultdict(set)
    for again in (False, True):
        each = recompute_all(program) if again else program
        timeline = emulator.execute(each)
        assert np.all((timeline.end_s > timeline.start_s)[each.is_pass])
        for (name, *_), _, _, remade, degree, lengths, _ in pass_keys(each).values():
            assert bool(remade) == again
            wanted[name, sum(lengths)].add((*program.layout.module(name).degrees[degree], remade))
    assert ran == wanted
    assert len({degree[:2] for own in ran.values() for degree in own}) > 3


def test_a_gpu_that_megatron_would_take_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UserError, match=r"harness.device=cpu: .*CUDA_VISIBLE_DEVICES"):
        bench.measure_rank(Mock(device="cpu"), Mock(), Mock())


def test_what_is_only_simulated_is_refused() -> None:
    emulator, program = emulated("strategy=megatron", "layout.tp=1", "layout.cp=2", "encoder_cp=false")
    with pytest.raises(IncompatibleError, match="encoder_cp=false: must be true with harness=emulate"):
        emulator.execute(program)
