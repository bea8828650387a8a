"""A real profile of the tiny model on this machine's CPU: interrupted, continued, and simulated with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest
import torch

from entrain_bench.cli import EXIT_INTERRUPTED, run_command
from entrain_bench.costs.profiled.file import read_profile
from entrain_bench.costs.profiled.timed_points import COLLECTIVES, DeviceProfile
from entrain_bench.specs.layer import LOGIT_CHUNK_TOKENS
from entrain_bench.specs.variants import with_labelled_head
from entrain_bench.train.profiling import timing as layers
from entrain_bench.train.profiling.timing import Bench, Patience, Target, measure_collectives, one_of_many, targets_of
from support.train.modules import small_model

OPTIONS = (
    "profile",
    "model=tiny",
    "device=cpu",
    "tokens=[1,64]",
    "tp=[1]",
    "cp=[1]",
    "ranks=[]",
    "min_repetitions=2",
    "max_repetitions=2",
)
PATIENCE = Patience(1, 1, 0.5, 60.0)
# TP and CP.
DEGREES = (1, 1), (2, 1), (1, 2), (2, 4)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """Packs that are measured; the fifth is interrupted."""
    # The command hides GPUs for good; after the test they are back.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    measured: list[tuple[int, ...]] = []
    measure = layers.TargetStages.measure

    def counting(self: layers.TargetStages, lengths: tuple[int, ...], patience: Patience) -> object:
        measured.append(lengths)
        if len(measured) == 5:
            raise KeyboardInterrupt
        return measure(self, lengths, patience)

    monkeypatch.setattr(layers.TargetStages, "measure", counting)
    return measured


@pytest.mark.wide
def test_a_profile_is_measured_goes_on_where_it_stopped_and_is_simulated_with(
    counted: list[tuple[int, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    stated = ["peak_bf16_flops=1e9", "host_bandwidth_bytes_per_s=1e9"]
    arguments = [*OPTIONS, *stated, "point_s=60", f"output={path}"]
    assert run_command(arguments) == EXIT_INTERRUPTED
    stopped = read_profile(path, "x")
    assert not stopped.finished
    # An embedding at both numbers of tokens, and two packs of a block, in stages of one block and of several.
    assert len(stopped.stages) == 6
    simulate = ["model=tiny", "cluster=tiny", "cluster/device=profiled", f"cluster.device.path={path}"]
    assert run_command([*simulate, f"results_dir={tmp_path}"]) == 2
    assert "is not finished. To resume, run entrain-bench profile with the same options" in capsys.readouterr().err
    assert run_command(arguments) == 0
    profile = read_profile(path, "x")
    assert profile.finished
    assert profile.stages[:6] == stopped.stages
    assert profile.constants == stopped.constants
    # Vision: two embeddings, 1 + 3 packs of each kind of block, two heads; the LLM: one kind of block less.
    assert len(counted) == 1 + (2 + 4 + 4 + 2) + (2 + 4 + 2)
    assert "vision" in (shown := capsys.readouterr().out)
    assert f"cluster.device.path={path}" in shown
    check_blocks(profile)
    job = ["strategy=megatron", "layout.tp=1", "layout.dp=2", "layout.pp=2", "global_batch=4", "microbatch_size=1"]
    data = ["workload=uniform", "iterations=1", "mlflow=false", f"results_dir={tmp_path}"]
    assert run_command([*simulate, *job, *data, "cluster.device.extrapolate=true"]) == 0
    (record,) = (json.loads(file.read_text()) for file in (tmp_path / "runs").rglob("*.json"))
    assert record["metrics"]["iteration_time_s"] > 0
    assert run_command([*arguments, "memory_bytes=3_000_000_000"]) == 0
    assert len(counted) == 21
    again = read_profile(path, "x")
    assert again.stages == profile.stages
    assert again.constants.memory_bytes == 3_000_000_000
    assert again.constants.sources["memory_bytes"].endswith("stated")


def check_blocks(profile: DeviceProfile) -> None:
    """Quantiles of times in order; which depth took longer, a busy machine decides."""
    blocks = [point for point in profile.stages if point.kind == "block"]
    assert blocks
    for point in blocks:
        for seconds in (point.forward_s, point.backward_s, point.remade_s):
            assert 0 < seconds[0] <= seconds[1] <= seconds[-1]


@pytest.fixture
def bench() -> Iterator[Bench]:
    with one_of_many(small_model(), DEGREES, torch.float32, torch.device("cpu")) as built:
        yield built


def target(bench: Bench, kind: str, tp: int = 1, module: str = "llm") -> Target:
    return next(each for each in targets_of(bench.model.module(module), tp) if each.kind == kind)


@pytest.mark.wide
@pytest.mark.parametrize("module", ["vision", "audio", "llm"])
@pytest.mark.parametrize("tp", [1, 2])
def test_every_kind_runs_as_a_shard(bench: Bench, module: str, tp: int) -> None:
    for each in targets_of(bench.model.module(module), tp):
        stages = layers.TargetStages.build(each, bench)
        points = stages.measure((5, 11), PATIENCE)
        assert [point.layers for point in points] == [*each.depths]
        sizes = [sum(p.numel() for p in stage.stage.parameters()) for stage in stages.stages.values()]
        parameters = next(layer.parameters for layer in each.module.kinds if layer.kind == each.kind)
        # A shard has its part of the weights, and all of the norms and of the biases that are added after summing.
        assert parameters / tp <= sizes[0] <= 1.2 * parameters / tp
        assert sizes[-1] == sizes[0] * each.depths[-1]


@pytest.mark.parametrize(("tp", "cp"), [(1, 2), (2, 4)])
def test_a_block_runs_with_the_tokens_of_one_context_parallel_rank(bench: Bench, tp: int, cp: int) -> None:
    seen: list[int] = []
    (block,) = targets_of(bench.model.llm, tp, cp)
    stages = layers.TargetStages.build(block, bench)
    for layer in stages.stages[1].stage.layers.values():
        layer.register_forward_pre_hook(lambda _, arguments: seen.append(len(arguments[0])))
    points = stages.measure((16, 48), PATIENCE)
    # Of 64 tokens, and with sequence parallelism its share of these.
    assert {*seen} == {64 // cp // tp}
    assert [(point.cp, point.lengths) for point in points] == [(cp, (16, 48))] * 2


def test_a_head_over_labelled_tokens_is_timed_with_many_and_with_few() -> None:
    model = with_labelled_head(small_model())
    device = torch.device("cpu")
    with one_of_many(model, [(1, 1)], torch.float32, device, logit_chunk=LOGIT_CHUNK_TOKENS) as built:
        heads = [each for each in targets_of(model.llm, 1) if each.kind == "head"]
        points = [layers.TargetStages.build(each, built).measure((48, 16), PATIENCE)[0] for each in heads]
        inputs = [built.inputs(each, (48, 16)).pack.labels for each in heads]
    assert [point.labelled for point in points] == [64, 4]
    assert [int((labels >= 0).sum()) for labels in inputs if labels is not None] == [64, 4]


def test_a_pack_that_takes_too_long_is_left_out(bench: Bench) -> None:
    stages = layers.TargetStages.build(target(bench, "block"), bench)
    assert stages.measure((64,), Patience(1, 1, 0.5, 1e-9)) == []
    assert all(not stage.stage.recompute for stage in stages.stages.values())


@pytest.mark.slow
def test_communication_of_two_ranks() -> None:
    started = perf_counter()
    points = measure_collectives("cpu", 2, (4096, 1 << 20), Patience(3, 5, 0.1, 1.0))
    assert [(point.operation, point.num_bytes) for point in points] == [
        (operation, size) for operation in COLLECTIVES for size in (4096, 1 << 20)
    ]
    assert all(point.ranks == 2 for point in points)
    total = sum(point.repetitions * point.seconds[0] for point in points)
    assert 0 < total < perf_counter() - started
    assert np.all([point.seconds[2] >= point.seconds[0] > 0 for point in points])
