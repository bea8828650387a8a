"""Memory that a rank really used."""

from __future__ import annotations

import resource

import torch


def peak_bytes(device: torch.device) -> float:
    """Highest memory so far: of the device's allocator, or of the whole process on a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
