"""Checkpoints of a training run: torch.distributed.checkpoint over safetensors, and the rest of the run as JSON.

They hold whole tensors, so a run resumes under any layout, by any strategy. A checkpoint counts once its
``meta.json`` is there. Nothing that is read runs code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save

from entrain_bench.base.errors import ExecutionError, UserError, require
from entrain_bench.base.files import write_atomically
from entrain_bench.train.running.learning import LearningStage

META = "meta.json"
FORMAT = "entrain-bench checkpoint 5"
# Files with these names are a checkpoint's own; other files stay.
_TENSORS = "shard-*.safetensors"
_DIGITS = 8

Stages = Mapping[tuple[int, int], LearningStage]


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The checkpoints of one run in a folder; the last one is kept, and other files of the folder stay.

    A checkpoint must share ``identity`` with the run, but not ``setup``, on which metrics depend.
    """

    folder: Path
    identity: Mapping[str, str]
    setup: Mapping[str, str]
    control: dist.ProcessGroup
    key: str = "harness.checkpoint_dir"  # as the user calls the folder

    def resume(self, stages: Stages, iterations: int | None = None) -> tuple[list[dict[str, float]], int]:
        """Read the newest whole checkpoint into the stages, if there is one; collective.

        Returns metrics of the iterations behind it, and how many of the first ones had another setup. ``UserError`` if
        it is damaged, of another run, or beyond the run's iterations.
        """
        written = self._written()
        if not written:
            return [], 0
        path, meta = written[-1]
        try:
            stored = dict(meta["identity"])
            files = dict(meta["files"])
            history = [dict(row) for row in meta["history"]]
            num_elsewhere = len(history) if meta["setup"] != dict(self.setup) else int(meta["num_elsewhere"])
        except (ValueError, KeyError, TypeError) as error:
            raise self._damaged(path) from error
        for name, value in self.identity.items():
            if (other := stored.get(name)) != value:
                other, here = (shorten(str(text), 120, placeholder="...") for text in (other, value))
                raise UserError(
                    f"{self.key}={self.folder}: its checkpoint has another {name} ({other}; this run has "
                    f"{here}). Choose another folder"
                )
        fits = iterations is None or iterations >= len(history)
        require(fits, "iterations", iterations, f"at least the {len(history)} of the checkpoint")
        try:
            # Torch reads all files of the folder.
            if files != _sizes(path):
                raise ValueError("files are missing")
            for trained in stages.values():
                trained.load(path)
        except (Exception, CheckpointException) as error:
            raise self._damaged(path) from error
        return history, num_elsewhere

    def save(self, iteration: int, stages: Stages, history: list[Any], num_elsewhere: int) -> None:
        """Write the state after an iteration, drop older ones; collective. ``ExecutionError`` if it cannot."""
        path = self.folder / f"iteration_{iteration:0{_DIGITS}d}"
        state: dict[str, Tensor] = {}
        for trained in stages.values():
            trained.gather_weights()
            state |= trained.state()
        try:
            if dist.get_rank() == 0:
                path.mkdir(parents=True, exist_ok=True)
                # A run that was killed while it wrote may have left files.
                _remove_files(path)
            dist.barrier(group=self.control)
            writer = HuggingFaceStorageWriter(str(path), save_distributed=True)
            save(state, storage_writer=writer, process_group=self.control)
        except (OSError, CheckpointException) as error:
            raise ExecutionError(f"{self.key}={self.folder}: cannot be written ({error})") from error
        if dist.get_rank() == 0:
            meta = {
                "format": FORMAT,
                "identity": dict(self.identity),
                "setup": dict(self.setup),
                "num_elsewhere": num_elsewhere,
                "iteration": iteration,
                "history": history,
                "files": _sizes(path),
            }
            write_atomically(path / META, json.dumps(meta).encode())
            for old, _ in self._written():
                if old != path:
                    _remove_files(old)
                    if not any(old.iterdir()):
                        old.rmdir()

    def _written(self) -> list[tuple[Path, dict[str, Any]]]:
        """Return complete checkpoints of this format, oldest first, with the content of their ``meta.json``."""
        written = []
        for file in sorted(self.folder.glob(f"iteration_{'[0-9]' * _DIGITS}/{META}")):
            try:
                meta = dict(json.loads(file.read_text()))
            except (ValueError, TypeError, OSError, RecursionError) as error:
                raise self._damaged(file.parent) from error
            if meta.get("format") == FORMAT:
                written.append((file.parent, meta))
            elif "identity" in meta:
                raise UserError(
                    f"{self.key}={self.folder}: {file.parent.name} was written by another version. "
                    "Choose another folder"
                )
        return written

    def _damaged(self, path: Path) -> UserError:
        return UserError(f"{self.key}={self.folder}: checkpoint {path.name} is damaged. Remove it")


def _sizes(path: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in sorted(path.glob(_TENSORS))}


def _remove_files(path: Path) -> None:
    for file in (path / META, *path.glob(_TENSORS)):
        file.unlink(missing_ok=True)
