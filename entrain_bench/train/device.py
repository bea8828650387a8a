"""Where a rank computes, and tensors brought there from the host."""

from __future__ import annotations

import os
import platform

import torch
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
    """Of parameters and activations: by torch's name, or ``auto``, bfloat16 on a GPU and float32 on a CPU."""
    auto = "bfloat16" if device.type == "cuda" else "float32"
    dtype: torch.dtype = getattr(torch, auto if name == "auto" else name)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """As settings have it."""
    return str(dtype).removeprefix("torch.")


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device, through pinned memory: the host does not wait for queued kernels."""
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)
