"""Replacements that megatron-core needs to run without a GPU, and for ranks with different numbers of stages.

Without a GPU, ``MODULES`` see a ``torch`` whose current CUDA device is the CPU, and ``Tensor.type()`` called by
megatron's optimizer answers as for a CUDA tensor. Always: ``megatron.core.optimizer`` does not gather the parameter
groups of all ranks, which would hang; Adam is torch's, whose steps checkpoints find.
"""

from __future__ import annotations

import functools
import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

MODULES = (
    "megatron.core.tensor_parallel.layers",
    "megatron.core.tensor_parallel.mappings",
    "megatron.core.distributed.param_and_grad_buffer",
    "megatron.core.optimizer.optimizer",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.utils",
)
_FACTORIES = ("empty", "tensor", "zeros")
_MAKERS = ("new_group", "new_subgroups_by_enumeration")
_TYPE_CALLER = "megatron.core.optimizer."
_original_type: Callable[..., Any] = torch.Tensor.type


class _Overlay:
    def __init__(self, base: Any, **names: Any) -> None:
        self.__dict__.update(names)
        self._base = base

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)


def prepare_platform() -> None:
    """Let megatron-core run without CUDA, and ranks make different numbers of optimizers; may be called again."""
    optimizer: Any = importlib.import_module("megatron.core.optimizer")
    if not isinstance(optimizer.torch, _Overlay):
        distributed = _Overlay(torch.distributed, all_gather_object=_gather_own)
        optimizer.torch = _Overlay(torch, distributed=distributed)
    optimizer.USING_PYTORCH_OPTIMIZER = True
    shards: Any = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    shards.USING_TE_OPTIMIZER = shards.USING_APEX_OPTIMIZER = False
    state: Any = importlib.import_module("megatron.core.parallel_state")
    if state._GLOBAL_MEMORY_BUFFER is None:
        state._set_global_memory_buffer()
    if torch.cuda.is_available():
        return
    torch.compiler.set_stance("force_eager")
    cuda = _Overlay(torch.cuda, current_device=lambda: torch.device("cpu"), current_stream=lambda: None)
    factories = {name: _replacing(getattr(torch, name), "device", "cuda", "cpu") for name in _FACTORIES}
    makers = {name: _replacing(getattr(torch.distributed, name), "backend", "nccl", None) for name in _MAKERS}
    for name in MODULES:
        module: Any = importlib.import_module(name)
        if not isinstance(module.torch, _Overlay):
            module.torch = _Overlay(torch, cuda=cuda, **factories)
            if hasattr(module, "dist"):
                module.dist = _Overlay(torch.distributed, **makers)
    if torch.Tensor.type is not _type:
        torch.Tensor.type = _type  # type: ignore[assignment, method-assign]


@contextmanager
def rank_of_many(num_ranks: int, rank: int = 0) -> Iterator[None]:
    """Make this process one of ``num_ranks``; collectives return at once, with shapes as from all ranks."""
    # PyTorch keeps its communication without partners, for tests of its own, under this name.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    prepare_platform()
    # Hooks hold earlier stages in circles that only the collector breaks.
    gc.collect()
    torch.cuda.empty_cache()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _gather_own(gathered: list[Any], own: Any) -> None:
    gathered[:] = [own] * len(gathered)


def _type(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
    """``Tensor.type``; asked by megatron's optimizer, the name of the CUDA type."""
    answer = _original_type(tensor, *args, **options)
    asked_by = sys._getframe(1).f_globals.get("__name__", "")
    if not args and not options and asked_by.startswith(_TYPE_CALLER):
        return answer.replace("torch.", "torch.cuda.")
    return answer


def _replacing(function: Callable[..., Any], option: str, value: str, instead: str | None) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if options.get(option) == value:
            options[option] = instead
        return function(*args, **options)

    return call
