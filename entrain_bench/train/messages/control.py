"""The process group of ranks, host data between them over gloo, and what ended one of them."""

from __future__ import annotations

import json
import os
import re
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import timedelta
from io import BytesIO
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist

from entrain_bench.base.errors import DeadlockError, ExecutionError, IncompatibleError, OutOfMemoryError, UserError
from entrain_bench.program import Program
from entrain_bench.program.assignment import Chunks
from entrain_bench.program.layout import Layout
from entrain_bench.specs.model import ModelSpec
from entrain_bench.specs.shapes import SampleShapes

# How gloo, NCCL, and the store that ranks meet at say that they waited too long.
_WAITED = re.compile("timed out|timing out|timeout after", re.IGNORECASE)
# Known to every rank, or with names of their own.
_ASIDE = ("model", "layout", "shapes", "chunks", "remade")
# Errors that say everything in their line; others are of the process they happened on.
_KNOWN = {
    kind.__name__: kind for kind in (UserError, IncompatibleError, DeadlockError, OutOfMemoryError, ExecutionError)
}


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
    content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(sizes, torch.tensor([len(content)]), group=group)
    longest = int(max(sizes))
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(content)] = content
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return [json.loads(part[: int(size)].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]


class WaitError(ExecutionError):
    """A rank waited too long for another one; ``waited_s`` says for how many seconds."""

    def __init__(self, text: str, waited_s: float) -> None:
        super().__init__(text)
        self.waited_s = waited_s


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception that ended ``who``; ``kind`` is empty for classes of other packages, ``waited_s`` usually 0."""

    who: str
    time_s: float
    kind: str
    text: str
    trace: str
    waited_s: float = 0.0

    @classmethod
    def of(cls, error: Exception, who: str) -> Self:
        """Return the exception that is being handled."""
        waited_s = error.waited_s if isinstance(error, WaitError) else 0.0
        name = ExecutionError.__name__ if waited_s else type(error).__name__
        kind = name if waited_s or type(error) in _KNOWN.values() else ""
        line = " ".join(str(error).split())
        text = line if kind else f"{name}: {line}"
        return cls(who, time.time(), kind, text, traceback.format_exc(), waited_s)

    def as_error(self) -> Exception:
        """Return the exception for the process that waits."""
        error = _KNOWN[self.kind](self.text) if self.kind else ExecutionError(f"{self.who}: {self.text}")
        error.__cause__ = ExecutionError(f"traceback of {self.who}:\n{self.trace}")
        return error


def program_to_bytes(program: Program) -> bytes:
    """Return the arrays of a program; every rank knows model, layout and shapes."""
    arrays = {f"columns.{field.name}": getattr(program, field.name) for field in _columns()}
    for module, chunks in enumerate(program.chunks):
        arrays |= {f"chunks.{module}.{field.name}": getattr(chunks, field.name) for field in fields(Chunks)}
    arrays |= {f"remade.{module}": blocks for module, blocks in enumerate(program.remade)}
    file = BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()


def program_from_bytes(content: bytes, model: ModelSpec, layout: Layout, shapes: SampleShapes) -> Program:
    """Return the program that ``program_to_bytes`` wrote."""
    with np.load(BytesIO(content), allow_pickle=False) as arrays:
        columns = {field.name: arrays[f"columns.{field.name}"] for field in _columns()}
        chunks = tuple(
            Chunks(**{field.name: arrays[f"chunks.{module}.{field.name}"] for field in fields(Chunks)})
            for module in range(len(model.modules))
        )
        num_remade = sum(name.startswith("remade.") for name in arrays)
        remade = tuple(arrays[f"remade.{module}"] for module in range(num_remade))
    return Program(model, layout, shapes, chunks=chunks, remade=remade, **columns)


def _columns() -> list[Any]:
    return [field for field in fields(Program) if field.name not in _ASIDE]
