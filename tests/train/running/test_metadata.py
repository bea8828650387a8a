"""Metadata of checkpoints: what torch writes is read, and nothing that would run code."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata as torchs
from torch.distributed.checkpoint.state_dict_saver import save

from entrain_bench.train.running.metadata import METADATA, check_metadata


class Runs:
    """What runs a command when it is unpickled."""

    def __init__(self, what: Callable[..., Any], *arguments: str) -> None:
        self.call = what, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def through_another_module(name: str, command: str) -> bytes:
    """A pickle that finds a function by the names that a module of torch's imports."""
    parts = (torchs.__name__, name, command)
    module, function, argument = (b"\x8c" + bytes([len(part)]) + part.encode() for part in parts)
    return b"\x80\x04" + module + function + b"\x93" + argument + b"\x85R."


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_torch_writes_is_read(tmp_path: Path) -> None:
    tensors = {dtype: torch.zeros(2, 3, dtype=getattr(torch, dtype)) for dtype in ("float32", "bfloat16", "int64")}
    save(tensors | {"step": torch.zeros(())}, checkpoint_id=str(tmp_path))
    check_metadata(tmp_path)


def test_what_runs_code_is_not_read(tmp_path: Path) -> None:
    command = f"touch {tmp_path / 'ran'}"
    assert hasattr(torchs, "os"), "the detour is none any more"
    for content in (
        pickle.dumps(Runs(os.system, command)),
        pickle.dumps({"in": [Runs(eval, "1")]}),
        pickle.dumps(torch.nn.Linear(1, 1)),
        through_another_module("os.system", command),
    ):
        (tmp_path / METADATA).write_bytes(content)
        with pytest.raises(pickle.UnpicklingError, match="is nothing that a checkpoint's metadata hold"):
            check_metadata(tmp_path)
    assert not (tmp_path / "ran").exists()
    # As a plain unpickler would.
    pickle.loads(through_another_module("os.system", command))  # noqa: S301
    assert (tmp_path / "ran").exists()
