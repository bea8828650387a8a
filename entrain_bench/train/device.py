"""Where a rank computes, and tensors brought there from the host."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from entrain_bench.errors import UserError
from entrain_bench.train.settings import TrainSettings


def device_of(settings: TrainSettings) -> torch.device:
    """Where this process computes.

    Raises:
        UserError: if a GPU is asked for and there is none for this process.
    """
    if find_device(settings.device, "harness.device").type == "cpu":
        return torch.device("cpu")
    local, found = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", settings.num_ranks))
    if local_ranks > found:
        raise UserError(f"harness.num_ranks={settings.num_ranks}: {local_ranks} ranks on a machine with {found} GPUs")
    return torch.device("cuda", local)


def find_device(name: str, key: str = "device") -> torch.device:
    """The CPU, or the first GPU of this process.

    Args:
        name: ``cpu``, ``cuda``, or ``auto`` for a GPU where there is one.
        key: what the user calls it.

    Raises:
        UserError: if a GPU is asked for and there is none for this process.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(f"{key}=cuda: this machine has no CUDA device; cpu runs the same over gloo")
    return torch.device("cuda", 0)


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device, without waiting for what the device still has to do.

    A copy out of pageable memory would stop the host until all queued kernels are through; pinned memory does not.
    """
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)
