"""The process group of ranks, host data between them over gloo, and the cause of a rank's end."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from entrain_bench.base.errors import DeadlockError, ExecutionError, IncompatibleError, OutOfMemoryError, UserError

# How gloo, NCCL, and the store that ranks meet at say that they waited too long.
_WAITED = re.compile("timed out|timing out|timeout after", re.IGNORECASE)
# Errors whose line is complete; other errors name the process.
_KNOWN = (UserError, IncompatibleError, DeadlockError, OutOfMemoryError, ExecutionError)


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
    # Not after an exception: it would wait for communication in which other ranks no longer take part.
    dist.destroy_process_group()


@contextmanager
def named_wait(setting: str, timeout_s: float) -> Iterator[None]:
    """Have ``ExecutionError`` name the setting that limits a wait, in place of gloo's, NCCL's or the store's error."""
    try:
        yield
    except RuntimeError as error:
        line = " ".join(str(error).split())
        if isinstance(error, ExecutionError) or not _WAITED.search(line):
            raise
        rank = os.environ.get("RANK", "0")
        waited = f"waited longer than {setting}={timeout_s:g} s for another rank"
        raise ExecutionError(f"rank {rank}: {waited} ({line})") from error


@dataclass(frozen=True, slots=True)
class PlanningGroup:
    """All ranks over gloo, for layouts and assignments of rank 0, which may take longer than any message."""

    group: dist.ProcessGroup
    timeout_s: float

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        values = [value]
        with named_wait("harness.planning_timeout_s", self.timeout_s):
            dist.broadcast_object_list(values, 0, group=self.group)
        return values[0]

    def of_first_rank(self, make: Callable[[], Any]) -> Any:
        """Return rank 0's result on every rank, or raise its exception there; other ranks do not call ``make``."""
        made = None
        if dist.get_rank() == 0:
            try:
                made = make()
            except Exception as error:
                made = portable(error, "rank 0")
        made = self.broadcast(made)
        if isinstance(made, Exception):
            raise made
        return made


def planning_group(timeout_s: float) -> PlanningGroup:
    """Make the group; collective over all ranks."""
    return PlanningGroup(dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)), timeout_s)


def gather_values(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """The values of all ranks, on every rank, by rank."""
    values = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def portable(error: Exception, who: str) -> Exception:
    """An exception of one line for another process, which may name ``who``; its traceback is a note."""
    line = " ".join(str(error).split())
    kind = type(error)
    made = kind(line) if kind in _KNOWN else ExecutionError(f"{who}: {kind.__name__}: {line}")
    made.add_note(f"traceback of {who}:\n{traceback.format_exc()}")
    return made
