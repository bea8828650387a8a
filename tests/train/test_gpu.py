"""On one GPU: packed attention and stages in bf16, and iterations of the tiny model over NCCL."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from entrain_bench.cli import run_command
from entrain_bench.costs.profiled.file import read_profile
from entrain_bench.records.metrics import RunResult
from entrain_bench.train.modules.blocks import AttentionKernel, packed_attention
from entrain_bench.train.modules.packing import Segments, StageGroups, make_segments
from support.train.modules import batch_of, groups_of_one, normal, relative_errors, run_module, small_model, stage_of
from support.train.runs import ONE_RANK, configuration, run_here

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICE = torch.device("cuda", 0)


def segments_on(device: str) -> Segments:
    return make_segments([5, 17, 2], [9, 17, 2], None, torch.device(device))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", [AttentionKernel.FLASH2, AttentionKernel.SDPA])
def test_bf16_attention_is_near_fp32_on_the_cpu(causal: bool, kernel: AttentionKernel) -> None:
    rng = np.random.default_rng(0)
    rows = [normal(rng, 24, 4, 32), normal(rng, 28, 2, 32), normal(rng, 28, 2, 32)]
    expected = packed_attention(*rows, segments_on("cpu"), causal=causal, kernel=AttentionKernel.CPU)
    on_gpu = [row.to("cuda", torch.bfloat16) for row in rows]
    actual = packed_attention(*on_gpu, segments_on("cuda"), causal=causal, kernel=kernel).float().cpu()
    error = torch.linalg.vector_norm(actual - expected) / torch.linalg.vector_norm(expected)
    assert error < 0.02


@pytest.fixture
def alone() -> Iterator[StageGroups]:
    with groups_of_one("cpu:gloo,cuda:nccl") as groups:
        yield groups


@pytest.mark.parametrize("name", ["vision", "audio", "llm"])
@pytest.mark.parametrize("splits", [False, True])
def test_stages_in_bf16_are_near_fp32_on_the_cpu(alone: StageGroups, name: str, splits: bool) -> None:
    model, on_gpu = small_model(), {"dtype": torch.bfloat16, "device": DEVICE, "recompute": True}
    exact = run_module(model, model.module(name), alone)
    errors = relative_errors(run_module(model, model.module(name), alone, splits_backward=splits, **on_gpu), exact)
    assert max(errors.values()) < 0.1, errors


@pytest.mark.parametrize("name", ["vision", "audio", "llm"])
def test_stages_never_stop_the_host(alone: StageGroups, name: str) -> None:
    model = small_model()
    stage = stage_of(model, model.module(name), alone, dtype=torch.bfloat16, device=DEVICE, recompute=True)
    first, pack = batch_of(stage.module)
    hidden = first.to(DEVICE, torch.bfloat16).requires_grad_()
    # The first time communicators start and the pool of pinned memory fills.
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            output = stage(hidden, pack)
            output.backward(torch.ones_like(output))
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_the_tiny_model_is_profiled(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    options = ["tokens=[1,64,1024]", "tp=[1,2]", "repetitions=10", f"output={path}"]
    assert run_command(["profile", "model=tiny", *options]) == 0
    profile = read_profile(path, "x")
    assert profile.finished
    assert (profile.subject.kind, profile.subject.dtype) == ("cuda", "bfloat16")
    assert profile.constants.memory_bandwidth_bytes_per_s > 1e11
    assert {point.tp for point in profile.stages} == {1, 2}


def trained(*overrides: str) -> RunResult:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=DEVICE)
    try:
        config = configuration(*ONE_RANK, "iterations=2", "harness.device=cuda", *overrides)
        outcome = run_here(config, dist.new_group(backend="gloo"))
    finally:
        dist.destroy_process_group()
    assert outcome is not None
    return outcome


def test_the_tiny_model_trains_in_bf16_unless_told_otherwise() -> None:
    outcome = trained()
    rows, execution = outcome.iterations, outcome.execution
    # Tokens are uniform over 1,024 words, and weights small: the first loss is near that of guessing.
    assert rows[0]["loss"] == pytest.approx(math.log(1024), rel=0.05)
    assert math.isfinite(rows[1]["loss"])
    assert rows[1]["loss"] != rows[0]["loss"]
    assert outcome.metrics["mfu"] > 0
    assert execution["device"] == torch.cuda.get_device_name(DEVICE)
    assert execution["dtype"] == "bfloat16"
    assert {execution["attention.vision"], execution["attention.llm"]} <= {"flash2", "sdpa"}
    assert outcome.remarks == ()


def test_float32_on_a_gpu_trains_and_has_no_mfu() -> None:
    outcome = trained("harness.dtype=float32")
    assert outcome.execution["dtype"] == "float32"
    assert outcome.execution["attention.llm"] == "sdpa"
    assert "mfu" not in outcome.metrics
    assert "the run used float32" in outcome.remarks[0]
