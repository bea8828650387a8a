"""Which kernel computes attention, and that kernels agree."""

from __future__ import annotations

import pytest
import torch

from entrain_bench.train.modules import StageGroups
from entrain_bench.train.modules import stage as stage_module
from entrain_bench.train.modules.attention import AttentionKernel, kernel_for
from support.train.modules import relative_errors, run_module, small_model

BF16 = torch.bfloat16
FP32 = torch.float32


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "head_dim", "expected"),
    [
        ("cpu", (0, 0), FP32, 64, "cpu"),
        ("cpu", (0, 0), BF16, 20, "cpu"),
        ("cuda", (8, 0), BF16, 80, "flash2"),
        ("cuda", (10, 0), BF16, 256, "flash2"),
        ("cuda", (7, 5), BF16, 80, "sdpa"),
        ("cuda", (9, 0), FP32, 128, "sdpa"),
        ("cuda", (9, 0), BF16, 20, "sdpa"),
        ("cuda", (9, 0), BF16, 264, "sdpa"),
    ],
)
def test_the_best_kernel_that_fits_is_taken(
    device: str,
    capability: tuple[int, int],
    dtype: torch.dtype,
    head_dim: int,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    module = small_model(head_dim=head_dim).llm
    assert kernel_for(module, dtype, torch.device(device)) == expected


@pytest.mark.wide
@pytest.mark.parametrize("name", ["vision", "llm"])
def test_stages_compute_the_same_by_length(alone: StageGroups, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    usual = run_module(model, model.module(name), alone)
    monkeypatch.setattr(stage_module, "kernel_for", lambda *_: AttentionKernel.SDPA)
    by_length = run_module(model, model.module(name), alone)
    assert max(relative_errors(by_length, usual).values()) < 1e-5
