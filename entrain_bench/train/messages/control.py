"""The process group's life, and small host data between ranks over gloo."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from entrain_bench.base.errors import ExecutionError
from entrain_bench.train.messages.failure import WaitError

# How gloo, NCCL, and the store that ranks meet at say that they waited too long.
_WAITED = re.compile("timed out|timing out|timeout after", re.IGNORECASE)


@contextmanager
def process_group(device: torch.device, timeout_s: float) -> Iterator[dist.ProcessGroup]:
    """Join the ranks that the launcher started; yields a gloo group of all of them."""
    timeout = timedelta(seconds=timeout_s)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=timeout, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=timeout)
    yield dist.new_group(backend="gloo", timeout=timeout)
    # Not after an exception: it would wait for communication that no one takes part in any more.
    dist.destroy_process_group()


@contextmanager
def named_wait(setting: str, timeout_s: float) -> Iterator[None]:
    """Have ``WaitError`` name the setting that limits a wait, in place of gloo's, NCCL's or the store's error."""
    try:
        yield
    except RuntimeError as error:
        line = " ".join(str(error).split())
        if isinstance(error, ExecutionError) or not _WAITED.search(line):
            raise
        rank = os.environ.get("RANK", "0")
        waited = f"waited longer than {setting}={timeout_s:g} s for another rank"
        raise WaitError(f"rank {rank}: {waited} ({line})", timeout_s) from error


@dataclass(frozen=True, slots=True)
class PlanningGroup:
    """All ranks over gloo, for what rank 0 plans and assigns, which may take it longer than any message."""

    group: dist.ProcessGroup
    timeout_s: float

    def broadcast(self, content: bytes | None) -> bytes:
        """Return rank 0's content on every rank."""
        with named_wait("harness.planning_timeout_s", self.timeout_s):
            size = torch.tensor([len(content or b"")])
            dist.broadcast(size, 0, group=self.group)
            buffer = torch.frombuffer(bytearray(content or int(size)), dtype=torch.uint8)
            dist.broadcast(buffer, 0, group=self.group)
            return buffer.numpy().tobytes()


def planning_group(timeout_s: float) -> PlanningGroup:
    """Make the group; collective over all ranks."""
    return PlanningGroup(dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)), timeout_s)


def gather_json(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """The values of all ranks, on every rank, by rank."""
    own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(sizes, torch.tensor([len(own)]), group=group)
    longest = int(max(sizes))
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(own)] = own
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return [json.loads(part[: int(size)].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]
