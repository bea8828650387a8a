"""Which kernel computes attention: the choice by hand, and trials of kernels played on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from entrain_bench.base.errors import IncompatibleError, UserError
from entrain_bench.train.modules import StageGroups
from entrain_bench.train.modules import attention as kernels
from entrain_bench.train.modules.attention import (
    AttentionKernel,
    Kernels,
    Machine,
    candidates,
    find_kernels,
    machine_of,
    packed_attention,
)
from support.train.modules import relative_errors, run_module, small_model

CPU, BF16, FP32 = torch.device("cpu"), torch.bfloat16, torch.float32
SDPA, FLASH2, FLASH3, FLASH4 = (AttentionKernel(name) for name in ("sdpa", "flash2", "flash3", "flash4"))
HOPPER, BLACKWELL = Machine("cuda", (9, 0), True), Machine("cuda", (10, 0), True)
AMPERE, TURING = Machine("cuda", (8, 0), True), Machine("cuda", (7, 5), True)
BARE = Machine("cuda", (9, 0))


@pytest.mark.parametrize(
    ("request_", "machine", "dtype", "head_dim", "expected"),
    [
        ("auto", Machine("cpu"), FP32, 64, ("cpu",)),
        ("torch", Machine("cpu"), BF16, 20, ("cpu",)),
        ("sdpa", Machine("cpu"), FP32, 64, ("sdpa",)),
        ("auto", HOPPER, BF16, 128, ("flash3", "flash2", "sdpa")),
        ("torch", HOPPER, BF16, 128, ("flash2", "sdpa")),
        ("sdpa", HOPPER, BF16, 128, ("sdpa",)),
        ("flash3", HOPPER, BF16, 256, ("flash3",)),
        ("flash4", HOPPER, BF16, 8, ("flash4",)),
        ("flash4", BLACKWELL, BF16, 128, ("flash4",)),
        ("auto", BLACKWELL, BF16, 128, ("flash2", "sdpa")),
        ("auto", AMPERE, BF16, 80, ("flash2", "sdpa")),
        ("auto", BARE, BF16, 80, ("flash2", "sdpa")),
        ("auto", TURING, BF16, 80, ("sdpa",)),
        ("auto", HOPPER, FP32, 128, ("sdpa",)),
        ("auto", HOPPER, BF16, 20, ("sdpa",)),
        ("auto", HOPPER, BF16, 264, ("sdpa",)),
    ],
)
def test_the_best_that_fits_comes_first(
    request_: str, machine: Machine, dtype: torch.dtype, head_dim: int, expected: tuple[str, ...]
) -> None:
    assert candidates(request_, machine, dtype, head_dim) == expected


@pytest.mark.parametrize("name", ["flash3", "flash4"])
def test_kernels_that_are_not_there_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=rf"^harness.kernels={name}: failed its trial on this device \(\w+: .*auto$"):
        find_kernels(name, models(), BF16, CPU)
    with pytest.raises(IncompatibleError, match=rf"{name}: cannot take head_dim=20; it must be a multiple of 8"):
        candidates(name, HOPPER, BF16, 20)


def test_this_machine_has_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine_of(CPU) == Machine("cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert machine_of(torch.device("cuda", 0)) == BARE
    monkeypatch.setattr(kernels, "find_spec", lambda name: name if name == "flash_attn_interface" else None)
    assert machine_of(torch.device("cuda", 0)) == HOPPER


def rightly(*rows: Any, causal: bool) -> Tensor:
    return packed_attention(*rows, causal=causal, kernel=SDPA)


def everything(*rows: Any, causal: bool) -> Tensor:  # noqa: ARG001
    return rightly(*rows, causal=False)


def halved(*rows: Any, causal: bool) -> Tensor:
    """Right outputs, wrong gradients."""
    output = rightly(*rows, causal=causal)
    return output / 2 + output.detach() / 2


def nothing(*rows: Any, causal: bool) -> Tensor:
    return rightly(*rows, causal=causal) * torch.nan


def refuses(*_: Any, **__: Any) -> Tensor:
    raise RuntimeError("unsupported: head size\nand a long trace")


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[..., Tensor]], list[str]]]:
    """Have a function compute with the kernel of a package; returns what was activated."""
    activated: list[str] = []

    def play(compute: Callable[..., Tensor]) -> list[str]:
        def packed(*rows: Any, causal: bool, kernel: AttentionKernel) -> Tensor:
            assert kernel is not FLASH2, "for GPUs only"
            return (rightly if kernel is SDPA else compute)(*rows, causal=causal)

        monkeypatch.setattr(kernels, "packed_attention", packed)
        monkeypatch.setattr(kernels, "activate_flash_attention_impl", activated.append)
        monkeypatch.setattr(kernels, "restore_flash_attention_impl", lambda **_: activated.append(""))
        return activated

    kernels._error.cache_clear()
    yield play
    kernels._error.cache_clear()


def models() -> tuple[Any, ...]:
    return small_model().modules


def test_a_package_that_computes_attention_is_taken(played: Any) -> None:
    activated = played(rightly)
    found = find_kernels("auto", models(), BF16, CPU, HOPPER)
    assert found == Kernels(dict.fromkeys(("vision", "audio", "llm"), FLASH3))
    assert activated == ["FA3"]


@pytest.mark.parametrize(
    ("compute", "reason"),
    [
        (everything, "results differ from float32 by"),
        (halved, "results differ from float32 by"),
        (nothing, "results differ from float32 by nan"),
        (refuses, "RuntimeError: unsupported: head size"),
    ],
)
def test_a_package_that_fails_its_trial_is_passed_over(played: Any, compute: Any, reason: str) -> None:
    activated = played(compute)
    found = find_kernels("auto", models(), BF16, CPU, HOPPER)
    # torch's own kernel fails as well, on a machine that says it is a GPU's.
    assert found.attention == dict.fromkeys(("vision", "audio", "llm"), SDPA)
    assert found.passed_over[0].startswith(f"attention kernel flash3 failed its trial and is not used: {reason}")
    assert "\n" not in found.passed_over[0]
    assert len(found.passed_over) == 2
    assert activated == ["FA3", ""]
    with pytest.raises(
        UserError, match=rf"^harness.kernels=flash3: failed its trial .*\({reason}.*\). .*harness.kernels=auto$"
    ):
        find_kernels("flash3", models(), BF16, CPU, HOPPER)


def test_modules_that_a_kernel_cannot_take_have_another(played: Any) -> None:
    played(rightly)
    modules = small_model(head_dim=20).modules
    taken = {"vision": FLASH3, "audio": FLASH3, "llm": SDPA}
    assert find_kernels("auto", modules, BF16, CPU, HOPPER).attention == taken
    with pytest.raises(IncompatibleError, match="head_dim=20"):
        find_kernels("flash3", modules, BF16, CPU, HOPPER)


def test_a_cpu_tries_nothing() -> None:
    assert find_kernels("auto", models(), FP32, CPU).attention == dict.fromkeys(("vision", "audio", "llm"), "cpu")
    assert find_kernels("sdpa", models(), FP32, CPU) == Kernels(dict.fromkeys(("vision", "audio", "llm"), SDPA))


@pytest.mark.wide
@pytest.mark.parametrize("name", ["vision", "llm"])
def test_stages_compute_the_same_by_length(alone: StageGroups, name: str) -> None:
    model = small_model()
    usual = run_module(model, model.module(name), alone)
    by_length = run_module(model, model.module(name), alone, kernels=Kernels({name: SDPA}))
    assert max(relative_errors(by_length, usual).values()) < 1e-5
