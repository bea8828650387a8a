"""Tensors from the host to the device that computes."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device, without waiting for what the device still has to do.

    A copy out of pageable memory would stop the host until all queued kernels are through; pinned memory does not.
    """
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)
