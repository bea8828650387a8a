"""The process group of ranks that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from entrain_bench.train.messages.control import process_group

TIMEOUT_S = 1800.0


@contextmanager
def ranks(timeout_s: float = TIMEOUT_S) -> Iterator[torch.device]:
    """Join the ranks of torchrun; yields this one's device: a GPU where there are any, else the CPU."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    with process_group(device, timeout_s):
        yield device
