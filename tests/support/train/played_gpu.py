"""A GPU played by the meta device: computes nothing, but refuses what CUDA refuses and what would stop the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.attention.varlen
from megatron.core.tensor_parallel import mappings
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GPU = torch.device("meta")
aten = torch.ops.aten


class HostStopError(RuntimeError):
    """An operation that CUDA refuses, or for which the host waits until the GPU has done all it was given."""


@contextmanager
def played_gpu() -> Iterator[None]:
    """Every tensor on ``GPU`` counts as one on CUDA.

    Meta tensors stand in for FakeTensorMode's, whose backward needs a CUDA driver (the autograd engine asks it for
    streams) and which would make the lengths and indices on the CPU fake as well. Reading a value of a meta tensor, or
    a size that depends on one, is an error of torch's own.
    """
    with (
        # megatron-core allocates what it gathers on the current device; ``prepare_platform`` makes that the CPU.
        mock.patch.object(mappings, "torch", torch),
        mock.patch.object(torch.cuda, "current_device", return_value=GPU),
        _Operations(),
        _Factories(),
    ):
        yield


class _Operations(TorchDispatchMode):
    """Refuses to mix CPU and GPU, copies that are not out of pinned memory, and what the flash kernel cannot take."""

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.is_pinned.default:
            return hasattr(args[0], "pinned")
        if func is aten._pin_memory.default:
            pinned = args[0].clone()
            pinned.pinned = True
            return pinned
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func is aten._to_copy.default and kwargs.get("device") == GPU:
            if not (tensors[0].is_meta or (kwargs.get("non_blocking") and hasattr(tensors[0], "pinned"))):
                raise HostStopError(f"a copy of {tuple(tensors[0].shape)} to the GPU waits for it")
        elif _mixes_devices(func, tensors):
            raise HostStopError(f"{func} on tensors of CPU and GPU")
        elif _reads_a_size(func, args):
            raise HostStopError(f"{func} reads a size from the GPU")
        if func is torch.ops.torch_attn._varlen_attn.default:
            check_flash(*args[:5])
        return func(*args, **kwargs)


def _mixes_devices(func: Any, tensors: list[Tensor]) -> bool:
    """Whether tensors are on both; a number may be on the CPU unless it is copied: kernels take it as an argument."""
    on_cpu = any(not t.is_meta and (t.dim() or func is aten.copy_.default) for t in tensors)
    return on_cpu and any(t.is_meta for t in tensors)


def _reads_a_size(func: Any, args: Any) -> bool:
    """Whether CUDA needs a number of chosen rows; only of operations that meta tensors allow."""
    if func in (aten.index_put.default, aten.index_put_.default):
        masks = [index for index in args[1] if index is not None and index.dtype is torch.bool]
        return any(mask.is_meta for mask in masks) and args[2].numel() > 1
    return bool(func is aten.masked_scatter_backward.default and args[0].is_meta)


class _Factories(TorchFunctionMode):
    """Refuses tensors made on the GPU from numbers of the host, which ``_Operations`` does not see."""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and torch.device(kwargs.get("device") or "cpu") == GPU:
            raise HostStopError("numbers of the host copied to the GPU")
        return func(*args, **kwargs)


def check_flash(query: Tensor, key: Tensor, value: Tensor, query_offsets: Tensor, key_offsets: Tensor) -> None:
    """What torch 2.13's flash attention kernel checks or, of addresses, assumes; see the messages in libtorch_cuda."""
    for rows in (query, key, value):
        assert rows.is_meta
        assert rows.dtype is torch.bfloat16
        assert rows.dim() == 3
        assert rows.shape[2] % 8 == 0
        assert rows.shape[2] <= 256
        # Eight numbers are loaded at a time, from addresses that are multiples of 16 bytes.
        assert rows.stride(2) == 1
        assert not any(at % 8 for at in (rows.stride(0), rows.stride(1), rows.storage_offset()))
    for offsets in (query_offsets, key_offsets):
        assert offsets.is_meta
        assert offsets.dtype is torch.int32
        assert offsets.is_contiguous()
        assert offsets.dim() == 1
    assert len(query_offsets) == len(key_offsets) > 1
