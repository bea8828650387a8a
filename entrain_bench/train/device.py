"""Where a rank computes, and replacements that megatron-core needs there."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from entrain_bench.base.errors import UserError
from entrain_bench.base.hosttime import processor_name
from entrain_bench.train.settings import TrainSettings


def device_of(settings: TrainSettings) -> torch.device:
    """Where this process computes; ``UserError`` if a GPU is asked for and there is none for this process."""
    if find_device(settings.device, "harness.device").type == "cpu":
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    num_gpus = torch.cuda.device_count()
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", settings.num_ranks))
    if local_ranks > num_gpus:
        need = f"{local_ranks} ranks need {local_ranks} GPUs, but this machine has {num_gpus}"
        raise UserError(f"harness.num_ranks={settings.num_ranks}: {need}")
    return torch.device("cuda", local)


def find_device(name: str, key: str = "device") -> torch.device:
    """The CPU, or the first GPU of this process; raises as ``device_of``. The user calls the setting ``key``."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(f"{key}=cuda: this machine has no CUDA device. Use {key}=cpu")
    return torch.device("cuda", 0)


def device_name(device: torch.device) -> str:
    """Return the manufacturer's name of the device."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return processor_name() or platform.machine()


def dtype_on(device: torch.device, name: str = "auto") -> torch.dtype:
    """Type of parameters and activations: by torch's name, or ``auto``, bfloat16 on a GPU and float32 on a CPU."""
    auto = "bfloat16" if device.type == "cuda" else "float32"
    dtype: torch.dtype = getattr(torch, auto if name == "auto" else name)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """The type's name in settings."""
    return str(dtype).removeprefix("torch.")


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device, through pinned memory: the host does not wait for queued kernels."""
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


MODULES = (
    "megatron.core.tensor_parallel.layers",
    "megatron.core.tensor_parallel.mappings",
    "megatron.core.distributed.param_and_grad_buffer",
    "megatron.core.optimizer.optimizer",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.utils",
    "megatron.core.transformer.moe.router",
    "megatron.core.transformer.moe.token_dispatcher",
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


class _NoStream:
    """A stream, and an event on it, where the host computes."""

    def wait_stream(self, _: Any) -> None:
        pass

    def record_event(self) -> _NoStream:
        return self

    def synchronize(self) -> None:
        pass


def prepare_platform() -> None:
    """Let megatron-core run without CUDA, and ranks make different numbers of optimizers; may be called again.

    Without a GPU, ``MODULES`` see a ``torch`` whose current CUDA device is the CPU, and ``Tensor.type()`` called by
    megatron's optimizer answers as for a CUDA tensor. Always: ``megatron.core.optimizer`` does not gather the parameter
    groups of all ranks, which would hang; Adam is torch's, whose steps checkpoints find.
    """
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
    cuda = _Overlay(
        torch.cuda,
        current_device=lambda: torch.device("cpu"),
        current_stream=lambda: None,
        Stream=_NoStream,
        stream=nullcontext,
    )
    factories = {name: _replacing(getattr(torch, name), "device", "cuda", "cpu") for name in _FACTORIES}
    # gloo gathers equal parts only, and a tensor-parallel rank has tokens of its own for experts.
    exchanging = _Overlay(torch.distributed, all_gather=_gather_parts, all_to_all_single=_exchange)
    makers = {name: _replacing(getattr(torch.distributed, name), "backend", "nccl", None) for name in _MAKERS}
    for name in MODULES:
        module: Any = importlib.import_module(name)
        if not isinstance(module.torch, _Overlay):
            module.torch = _Overlay(torch, cuda=cuda, distributed=exchanging, **factories)
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


def _gather_parts(parts: list[Tensor], own: Tensor, group: dist.ProcessGroup) -> None:
    """Gather parts of different sizes from the ranks of a group."""
    for rank, part in enumerate(parts):
        if rank == group.rank():
            part.copy_(own)
        dist.broadcast(part, group_src=rank, group=group)


def _exchange(
    received: Tensor, sent: Tensor, output_split_sizes: Any = None, input_split_sizes: Any = None, **options: Any
) -> None:
    """``all_to_all_single`` with sizes that megatron-core has left in tensors, for they are not on a GPU."""
    splits = (output_split_sizes, input_split_sizes)
    taken, given = (None if sizes is None else [*map(int, sizes)] for sizes in splits)
    dist.all_to_all_single(received, sent, output_split_sizes=taken, input_split_sizes=given, **options)


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
