"""What can go wrong with training: one line each, weights left alone, checkpoints that continue exactly."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from entrain_bench.errors import ExecutionError, IncompatibleError, OutOfMemoryError, UserError
from entrain_bench.experiment import prepare
from entrain_bench.program.layout import check_tensor_parallel
from entrain_bench.run import compose_cells
from entrain_bench.train import loop
from entrain_bench.train.build import build_runtime
from entrain_bench.train.clock import Clock
from entrain_bench.train.compose import Composer
from entrain_bench.train.control import PlanningGroup, planning_group
from entrain_bench.train.data import SampleData
from entrain_bench.train.handover import config_from_json, read_failures, write_failure
from entrain_bench.train.harness import TrainHarness
from entrain_bench.train.modules import Stage
from entrain_bench.train.platform import prepare_platform
from support.parity import CPU, batch, configuration
from support.ranks import RankError, run_ranks
from support.training import DISJOINT, ONE_RANK, train_here

# --- Before anything starts.


@pytest.mark.parametrize(
    ("overrides", "kind", "message"),
    [
        (["harness.num_ranks=2"], UserError, "harness.num_ranks=2: must be the 4 ranks of cluster=tiny"),
        (["cluster=a40x64"], UserError, "harness.num_ranks=4: must be the 64 ranks of cluster=a40x64"),
        (["model=mllm_9b"], IncompatibleError, "model=mllm_9b: has a generator .*harness=train cannot"),
        (["harness.dtype=float16"], UserError, "harness.dtype=float16: unknown"),
        (["harness.on_non_finite=ignore"], UserError, "harness.on_non_finite=ignore: unknown"),
    ],
)
def test_settings_that_do_not_fit_are_refused(overrides: list[str], kind: type[UserError], message: str) -> None:
    (cell,) = compose_cells(["harness=train", "model=tiny", "cluster=tiny", *overrides])
    with pytest.raises(kind, match=message):
        prepare(cell.config)


def harness(device: str) -> TrainHarness:
    executor = prepare(config_from_json(configuration("model=tiny", f"harness.device={device}"))).executor
    assert isinstance(executor, TrainHarness)
    return executor


def test_a_gpu_for_every_rank_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"harness.device=cuda: this machine has no CUDA device"):
        _ = harness("cuda").torch_device
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match=r"harness.num_ranks=4: 4 ranks on a machine with 2 GPUs"):
        _ = harness("cuda").torch_device
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert harness("auto").torch_device == torch.device("cuda", 1)


def test_torchrun_must_start_as_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    config = config_from_json(configuration("model=tiny"))
    with pytest.raises(UserError, match=r"harness.num_ranks=4: must be the 3 ranks that torchrun started"):
        harness("cpu").train(config, lambda _: None)


def test_tensor_parallelism_must_divide_words_and_channels() -> None:
    (cell,) = compose_cells(["model=tiny_av", "model.modules.llm.vocab_size=1022"])
    model = prepare(cell.config).job.model
    check_tensor_parallel(model.llm, 2)
    with pytest.raises(UserError, match=r"layout.tp=4: must divide the 1022 words of module llm"):
        check_tensor_parallel(model.llm, 4)
    audio = model.module("audio")
    assert audio.sharded_sizes["channels of embed_gemms[0]"] == audio.layers[0].gemms[0].n


def test_offloaded_modules_are_refused() -> None:
    with pytest.raises(RankError, match=r"layout.vision.offload: harness=train keeps weights on the device"):
        run_ranks(_offloaded, 1, configuration(*DISJOINT))


def _offloaded(_: int, config: str) -> None:
    setting = prepare(config_from_json(config))
    layout = setting.strategy.plan(setting.profile)
    vision, llm = layout.modules
    build_runtime(
        setting.job,
        replace(layout, modules=(replace(vision, offload=True), llm)),
        setting.executor,
        CPU,
        0,
        dist.group.WORLD,
    )


# --- What ranks leave behind.


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (UserError("a=1:\n must be 2"), UserError, r"^a=1: must be 2$"),
        (IncompatibleError("no"), IncompatibleError, "^no$"),
        (ExecutionError("loss=nan"), ExecutionError, "^loss=nan$"),
        (KeyError("x"), ExecutionError, "^rank 1: KeyError: 'x'$"),
        (torch.OutOfMemoryError("CUDA"), ExecutionError, "^rank 1: OutOfMemoryError: CUDA$"),
    ],
)
def test_failures_travel_to_the_launcher(tmp_path: Path, error: Exception, kind: type[Exception], message: str) -> None:
    write_failure(tmp_path, 1, error)
    write_failure(tmp_path, 0, RuntimeError("Connection closed by peer"))
    first = read_failures(tmp_path)[0].as_error()
    assert type(first) is kind
    with pytest.raises(kind, match=message):
        raise first


# --- On ranks.


@contextmanager
def poisoned(bad: Callable[[SampleData], bool]) -> Iterator[None]:
    """Features of some batches are not numbers."""
    features = SampleData.features

    def spoil(data: SampleData, *args: Any) -> torch.Tensor:
        return features(data, *args) * (float("nan") if bad(data) else 1.0)

    with patch.object(SampleData, "features", spoil):
        yield


def _non_finite(rank: int, config: str) -> str:
    prepare_platform()
    setting, control = prepare(config_from_json(config)), dist.group.WORLD
    planning = planning_group(60.0)
    layout, _seconds = loop.plan(setting, planning)
    runtime = build_runtime(setting.job, layout, setting.executor, CPU, 0, control)
    second = batch(setting, 1).sample_ids.tolist()
    with poisoned(lambda data: data.shapes.sample_ids.tolist() == second):
        composer = Composer(setting, layout, 0, planning, runtime.prepare)
        works = [composer.take(iteration, last=iteration == 2).work for iteration in range(3)]
        weights = [p for trained in runtime.stages.values() for p in trained.stage.parameters()]
        runtime.run(works[0], Clock(CPU))
        before = [p.detach().clone() for p in weights]
        assert not isfinite(runtime.run(works[1], Clock(CPU)).grad_norm)
        assert all(torch.equal(p, old) for p, old in zip(weights, before, strict=True)), "weights changed"
        assert runtime.run(works[2], Clock(CPU)).grad_norm > 0
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


def test_out_of_memory_names_the_action_and_its_bytes() -> None:
    (line,) = run_ranks(_out_of_memory, 1, configuration(*ONE_RANK))
    assert line.startswith("memory: rank 0 ran out at forward of llm microbatch 0 on stage 0 of replica 0 (action ")
    assert "predicted to need 0." in line


def _checkpoints(rank: int, configs: dict[str, str], folder: Path) -> dict[str, str]:
    """Train whole and in two halves; what is refused, by case."""
    for name in ("float32", "bfloat16"):
        whole = train_here(configs[name])
        half, rest = (_into(configs[name], folder / name, iterations) for iterations in (2, 4))
        # What was done is not done again.
        assert [row["loss"] for row in train_here(half)] == [row["loss"] for row in train_here(half)]
        again = train_here(rest)
        for key in ("loss", "grad_norm"):
            assert [row[key] for row in again] == [row[key] for row in whole], (name, key)
    last = _into(configs["float32"], folder / "float32", 4)
    changed = {
        "seed": last.replace('"seed": 0', '"seed": 1'),
        "dtype": last.replace('"dtype": "float32"', '"dtype": "bfloat16"'),
        "layout": _into(configs["other layout"], folder / "float32", 4),
        "short": _into(configs["float32"], folder / "float32", 3),
    }
    found = {name: _refusal(config) for name, config in changed.items()}
    stored = folder / "float32" / "iteration_00000004"
    for name, path in (("damaged data", next(iter(sorted(stored.glob("*.distcp"))))), ("meta", stored / "meta.json")):
        dist.barrier()
        if rank == 0:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        dist.barrier()
        found[name] = _refusal(last)
    return found


def _into(config: str, folder: Path, iterations: int) -> str:
    values = json.loads(config)
    values["harness"] |= {"checkpoint_dir": str(folder), "checkpoint_every": 2}
    return json.dumps(values | {"iterations": iterations})


def _refusal(config: str) -> str:
    try:
        train_here(config)
    except UserError as error:
        return str(error)
    return "went on"


def test_checkpoints_continue_exactly_and_only_their_own_run(tmp_path: Path) -> None:
    common = (*DISJOINT, "iterations=4", "distributed_optimizer=true", "harness.epsilon=1e-8")
    configs = {name: configuration(*common, f"harness.dtype={name}") for name in ("float32", "bfloat16")}
    configs["other layout"] = configuration(*common, "layout.dp=1", "layout.pp=4")
    for found in run_ranks(_checkpoints, 4, configs, tmp_path):
        assert "its checkpoint is of another seed (0; this run has 1)" in found["seed"]
        assert "its checkpoint is of another dtype (float32; this run has bfloat16)" in found["dtype"]
        assert "its checkpoint is of another layout" in found["layout"]
        assert found["short"] == "iterations=3: must be at least the 4 of the checkpoint"
        assert found["damaged data"].endswith("damaged checkpoint iteration_00000004; remove it")
        assert found["meta"].endswith("damaged checkpoint iteration_00000004; remove it")


# --- What the strategy sees.


class Spy:
    """A strategy that notes what it composed after which observations."""

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
        composer = Composer(spied, layout, 0, PlanningGroup(dist.group.WORLD, 60.0), Mock())
        for iteration in range(5):
            composer.take(iteration, last=iteration == 4)
            observed: Any = f"t{iteration}"
            composer.observe(observed)
    finally:
        dist.destroy_process_group()
    assert log == [(), (), ("t0",), ("t0", "t1"), ("t0", "t1", "t2")]
