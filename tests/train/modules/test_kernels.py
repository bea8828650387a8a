"""Which kernel computes attention: the choice by hand, and trials of kernels played on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.attention
from torch import Tensor
from torch.library import Library
from torch.nn.attention import _registry

from entrain_bench.base.errors import IncompatibleError, UserError
from entrain_bench.train.modules import StageGroups, kernels
from entrain_bench.train.modules.attention import AttentionKernel
from entrain_bench.train.modules.kernels import Kernels, Machine, candidates, find_kernels, machine_of
from support.train.modules import relative_errors, run_module, small_model

CPU, BF16, FP32 = torch.device("cpu"), torch.bfloat16, torch.float32
SDPA, FLASH2, FLASH3, FLASH4 = (AttentionKernel(name) for name in ("sdpa", "flash2", "flash3", "flash4"))
BOTH = frozenset({FLASH3, FLASH4})
HOPPER, BLACKWELL = Machine("cuda", (9, 0), BOTH), Machine("cuda", (10, 0), BOTH)
AMPERE, TURING = Machine("cuda", (8, 0), BOTH), Machine("cuda", (7, 5), BOTH)
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


@pytest.mark.parametrize(
    ("request_", "machine", "dtype", "head_dim", "kind", "message"),
    [
        ("flash3", Machine("cpu"), BF16, 64, UserError, r"kernels=flash3: needs a GPU of compute capability 9\.x"),
        ("flash3", BLACKWELL, BF16, 64, UserError, r"kernels=flash3: needs a GPU of compute capability 9\.x\."),
        ("flash4", AMPERE, BF16, 64, UserError, r"flash4: needs a GPU of compute capability 9\.x or 10\.x"),
        ("flash3", BARE, BF16, 64, UserError, "flash3: needs the Python package flash_attn_interface"),
        ("flash4", BARE, BF16, 64, UserError, r"flash4: needs the Python package flash_attn\.cute\.interface"),
        ("flash3", HOPPER, FP32, 64, UserError, "flash3: needs harness.dtype=bfloat16"),
        (
            "flash3",
            HOPPER,
            BF16,
            20,
            IncompatibleError,
            "flash3: cannot take head_dim=20; it must be a multiple of 8, at most 256",
        ),
    ],
)
def test_kernels_that_are_not_there_are_refused(
    request_: str, machine: Machine, dtype: torch.dtype, head_dim: int, kind: type[UserError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        candidates(request_, machine, dtype, head_dim)


def test_this_machine_has_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine_of(CPU) == Machine("cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert machine_of(torch.device("cuda", 0)) == BARE
    monkeypatch.setattr(kernels, "find_spec", lambda name: name if name == "flash_attn_interface" else None)
    assert machine_of(torch.device("cuda", 0)) == Machine("cuda", (9, 0), frozenset({FLASH3}))

    def broken(_: str) -> None:
        raise ImportError("undefined symbol")

    monkeypatch.setattr(kernels, "find_spec", broken)
    assert machine_of(torch.device("cuda", 0)) == BARE


# Which keys ``[queries, keys]`` are seen.
Sees = Callable[[int, int, bool], Tensor]


def rightly(queries: int, keys: int, causal: bool) -> Tensor:
    """The last query sees the last key."""
    seen = torch.ones(queries, keys, dtype=torch.bool)
    return seen.tril(keys - queries) if causal else seen


def everything(queries: int, keys: int, _: bool) -> Tensor:
    return rightly(queries, keys, False)


def first_to_first(queries: int, keys: int, causal: bool) -> Tensor:
    """The first query sees the first key alone: wrong only where keys are more."""
    seen = rightly(queries, keys, False)
    return seen.tril() if causal else seen


def nothing(queries: int, keys: int, _: bool) -> Tensor:
    return torch.zeros(queries, keys, dtype=torch.bool)


def refuses(*_: Any) -> Tensor:
    raise RuntimeError("unsupported: head size\nand a long trace")


def played(sees: Sees, backward: Sees | None = None) -> Library:
    """A kernel for CPUs under the operators that torch's variable-length attention calls; they check its signature."""
    library = Library("aten", "IMPL")

    def segments(
        sees: Sees, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, causal: bool
    ) -> Iterator[Any]:
        """Rows of queries and keys of each segment, heads first in float32, and the weights of keys."""
        for (a, b), (c, d) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
            groups = q.shape[1] // k.shape[1]
            queries = q[a:b].float().transpose(0, 1)
            keys, values = (x[c:d].float().transpose(0, 1).repeat_interleave(groups, 0) for x in (k, v))
            scores = queries @ keys.transpose(1, 2) / q.shape[2] ** 0.5
            weights = scores.masked_fill(~sees(b - a, d - c, causal), float("-inf")).softmax(-1)
            yield slice(a, b), slice(c, d), groups, queries, keys, values, weights

    def forward(
        q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, mq: int, mk: int, p: float, causal: bool, _: bool, **given: Any
    ) -> Any:
        assert (p, given["window_size_left"], given["window_size_right"]) == (0.0, -1, 0 if causal else -1)
        assert mq == cu_q.diff().max()
        assert mk == cu_k.diff().max()
        out = torch.empty_like(q)
        for rows, _, _, _, _, values, weights in segments(sees, q, k, v, cu_q, cu_k, causal):
            out[rows] = (weights @ values).transpose(0, 1).to(q.dtype)
        return out, torch.zeros(q.shape[1], len(q)), torch.zeros(2, dtype=torch.uint64), torch.zeros(()), torch.zeros(0)

    def back(
        grad: Any, q: Any, k: Any, v: Any, _out: Any, _lse: Any, cu_q: Any, cu_k: Any, *given: Any, **_: Any
    ) -> Any:
        found = [torch.empty_like(rows) for rows in (q, k, v)]
        causal, scale = given[3], q.shape[2] ** -0.5
        for rows, of_keys, groups, queries, keys, values, weights in segments(
            backward or sees, q, k, v, cu_q, cu_k, causal
        ):
            given_rows = grad[rows].float().transpose(0, 1)
            by_weights = given_rows @ values.transpose(1, 2)
            by_scores = weights * (by_weights - (by_weights * weights).sum(-1, keepdim=True)) * scale
            found[0][rows] = (by_scores @ keys).transpose(0, 1).to(q.dtype)
            for into, each in ((1, by_scores.transpose(1, 2) @ queries), (2, weights.transpose(1, 2) @ given_rows)):
                summed = each.unflatten(0, (-1, groups)).sum(1)
                found[into][of_keys] = summed.transpose(0, 1).to(q.dtype)
        return tuple(found)

    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", back, "CPU")
    return library


class Handle:
    """What torch keeps of a package that it was told to call."""

    def __init__(self, library: Library) -> None:
        self.library = library

    def remove(self) -> None:
        self.library._destroy()


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Packages by torch's names; nothing of them is left behind."""
    registered: dict[str, Any] = {}
    monkeypatch.setattr(_registry, "_FLASH_ATTENTION_IMPLS", registered)
    kernels._error.cache_clear()
    yield registered
    torch.nn.attention.restore_flash_attention_impl(_raise_warn=False)
    kernels._error.cache_clear()


def models() -> tuple[Any, ...]:
    return small_model().modules


def test_a_package_that_computes_attention_is_taken(packages: dict[str, Any]) -> None:
    packages["FA3"] = lambda: Handle(played(rightly))
    found = find_kernels("auto", models(), BF16, CPU, HOPPER)
    assert found == Kernels(dict.fromkeys(("vision", "audio", "llm"), FLASH3))
    assert torch.nn.attention.current_flash_attention_impl() == "FA3"


@pytest.mark.wide
@pytest.mark.parametrize(
    ("sees", "backward", "reason"),
    [
        (everything, None, "results differ from float32 by"),
        (first_to_first, None, "results differ from float32 by"),
        (rightly, everything, "results differ from float32 by"),
        (nothing, None, "results differ from float32 by nan"),
        (refuses, None, "RuntimeError: unsupported: head size"),
    ],
)
def test_a_package_that_fails_its_trial_is_passed_over(
    packages: dict[str, Any], sees: Sees, backward: Sees | None, reason: str
) -> None:
    packages["FA3"] = lambda: Handle(played(sees, backward))
    found = find_kernels("auto", models(), BF16, CPU, HOPPER)
    # torch's own kernel has nothing for CPUs: it fails as well, on a machine that says it is a GPU's.
    assert found.attention == dict.fromkeys(("vision", "audio", "llm"), SDPA)
    assert found.passed_over[0].startswith(f"attention kernel flash3 failed its trial and is not used: {reason}")
    assert "\n" not in found.passed_over[0]
    assert found.passed_over[1].startswith("attention kernel flash2 failed its trial and is not used: NotImplemented")
    assert torch.nn.attention.current_flash_attention_impl() is None
    with pytest.raises(
        UserError, match=rf"^harness.kernels=flash3: failed its trial .*\({reason}.*\). .*harness.kernels=auto$"
    ):
        find_kernels("flash3", models(), BF16, CPU, HOPPER)


def test_modules_that_a_kernel_cannot_take_have_another(packages: dict[str, Any]) -> None:
    packages["FA3"] = lambda: Handle(played(rightly))
    modules = small_model(head_dim=20).modules
    assert find_kernels("auto", modules, BF16, CPU, HOPPER).attention == {
        "vision": FLASH3,
        "audio": FLASH3,
        "llm": SDPA,
    }
    with pytest.raises(IncompatibleError, match="head_dim=20"):
        find_kernels("flash3", modules, BF16, CPU, HOPPER)


def test_a_cpu_tries_nothing() -> None:
    assert find_kernels("auto", models(), FP32, CPU).attention == dict.fromkeys(("vision", "audio", "llm"), "cpu")
    assert find_kernels("sdpa", models(), FP32, CPU) == Kernels(dict.fromkeys(("vision", "audio", "llm"), SDPA))


@pytest.mark.wide
@pytest.mark.parametrize("name", ["vision", "llm"])
def test_stages_compute_the_same_with_every_kernel(alone: StageGroups, name: str, packages: dict[str, Any]) -> None:
    model = small_model()
    module = model.module(name)
    usual = run_module(model, module, alone)
    by_length = run_module(model, module, alone, kernels=Kernels({name: SDPA}))
    assert max(relative_errors(by_length, usual).values()) < 1e-5
    packages["FA3"] = lambda: Handle(played(rightly))
    found = find_kernels("auto", [module], BF16, CPU, HOPPER)
    assert max(relative_errors(run_module(model, module, alone, kernels=found), usual).values()) < 1e-5
