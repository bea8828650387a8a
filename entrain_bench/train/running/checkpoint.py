"""Checkpoints of a training run: torch.distributed.checkpoint over safetensors, and the rest of the run as JSON.

They hold whole tensors, so a run resumes under any layout, by any strategy. A checkpoint counts once its
``meta.json`` is there. Nothing that is read runs code. A tensor parallel parameter is a ``DTensor`` for each of its
matrices (gate and up); data parallel ranks put the optimizer's states together and take turns to write them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from entrain_bench.base.errors import ExecutionError, UserError, require
from entrain_bench.base.files import write_atomically
from entrain_bench.train.modules.stage import NamedParameter, named_parameters
from entrain_bench.train.running.stages import Part, ShardedStage, TrainedStage, local_part

META = "meta.json"
FORMAT = "entrain-bench checkpoint 5"
MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = "step"
# Files with these names are a checkpoint's own; other files stay.
_TENSORS = "shard-*.safetensors"
_DIGITS = 8

Stages = Mapping[tuple[int, int], TrainedStage | ShardedStage]


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The checkpoints of one run in a folder; the last one is kept, and other files of the folder stay.

    A checkpoint must share ``identity`` with the run, but not ``setup``, on which metrics depend.
    """

    folder: Path
    identity: Mapping[str, str]
    setup: Mapping[str, str]
    control: dist.ProcessGroup

    def resume(self, stages: Stages, iterations: int) -> tuple[list[dict[str, float]], int]:
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
                    f"harness.checkpoint_dir={self.folder}: its checkpoint has another {name} ({other}; this run has "
                    f"{here}). Choose another folder"
                )
        require(iterations >= len(history), "iterations", iterations, f"at least the {len(history)} of the checkpoint")
        try:
            # Torch reads all files of the folder.
            if files != _sizes(path):
                raise ValueError("files are missing")
            for trained in stages.values():
                _load_stage(path, trained)
        except (Exception, CheckpointException) as error:
            raise self._damaged(path) from error
        return history, num_elsewhere

    def save(self, iteration: int, stages: Stages, history: list[Any], num_elsewhere: int) -> None:
        """Write the state after an iteration, drop older ones; collective. ``ExecutionError`` if it cannot."""
        path = self.folder / f"iteration_{iteration:0{_DIGITS}d}"
        state: dict[str, Tensor] = {}
        for trained in stages.values():
            trained.gather_weights()
            state |= stage_state(trained)
        try:
            if dist.get_rank() == 0:
                path.mkdir(parents=True, exist_ok=True)
                # A run that was killed while it wrote may have left files.
                _remove_files(path)
            dist.barrier(group=self.control)
            writer = HuggingFaceStorageWriter(str(path), save_distributed=True)
            save(state, storage_writer=writer, process_group=self.control)
        except (OSError, CheckpointException) as error:
            raise ExecutionError(f"harness.checkpoint_dir={self.folder}: cannot be written ({error})") from error
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
                    f"harness.checkpoint_dir={self.folder}: {file.parent.name} was written by another version. "
                    "Choose another folder"
                )
        return written

    def _damaged(self, path: Path) -> UserError:
        return UserError(f"harness.checkpoint_dir={self.folder}: checkpoint {path.name} is damaged. Remove it")


def _sizes(path: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in sorted(path.glob(_TENSORS))}


def _remove_files(path: Path) -> None:
    for file in (path / META, *path.glob(_TENSORS)):
        file.unlink(missing_ok=True)


def stage_state(trained: TrainedStage | ShardedStage) -> dict[str, Tensor]:
    """Return the tensors that this rank writes, fp32 on the CPU: parameters, moments, steps; collective."""
    groups = trained.groups
    state: dict[str, Tensor] = {}
    for number, named in enumerate(named_parameters(trained.stage)):
        # A rank that has nothing of a parameter takes part, too.
        part = trained.part_of(named.parameter)
        names = ("value", *MOMENTS) if named.parameter.requires_grad else ("value",)
        if part is not None and part.states is not None:
            state[STEP] = _step(part.states).detach().cpu().view(1)
        whole = _whole(trained, named, part, len(names)).cpu()
        is_second = trained.stage.held.start > 0 and named.key == f"{trained.stage.module.name}.0.words.weight"
        sharing = groups.sharing_of(named.parameter)
        writes = number % sharing.size() == sharing.rank() and (named.dim >= 0 or groups.tp.rank() == 0)
        if writes and not is_second:
            for name, values in zip(names, whole, strict=True):
                state |= dict(_pieces(named, name, values, groups.tp))
    return state


def _whole(trained: TrainedStage | ShardedStage, named: NamedParameter, part: Part | None, count: int) -> Tensor:
    """Value and moments of this rank's tensor parallel shard of a parameter ``[count, *shape]``."""
    shape = (count, *named.parameter.shape)
    held = [] if part is None else [part.value]
    if part is not None and part.states is not None:
        held += [local_part(_moment(part, name)) for name in MOMENTS]
    if not trained.cuts_states(named.parameter):
        return torch.stack([rows.detach() for rows in held]).view(shape)
    # Summed as integers: every bit of a sum with zeros is that of the one part, also of a negative zero.
    flat = torch.zeros(shape, dtype=torch.float32, device=named.parameter.device).view(count, -1)
    if part is not None:
        flat[:, part.start : part.start + part.value.numel()] = torch.stack([rows.detach().view(-1) for rows in held])
    dist.all_reduce(flat.view(torch.int32), group=trained.groups.sharing_of(named.parameter))
    return flat.view(shape)


@torch.no_grad()
def _load_stage(path: Path, trained: TrainedStage | ShardedStage) -> None:
    """Read a stage; optimizer states that do not exist yet are made. Raises if a tensor is missing or damaged."""
    wholes: list[Tensor] = []
    state: dict[str, Tensor] = {}
    named_ones = list(named_parameters(trained.stage))
    for named in named_ones:
        names = ("value", *MOMENTS) if named.parameter.requires_grad else ("value",)
        wholes.append(torch.full((len(names), *named.parameter.shape), torch.nan))
        for name, values in zip(names, wholes[-1], strict=True):
            state |= dict(_pieces(named, name, values, trained.groups.tp))
    if any(named.parameter.requires_grad for named in named_ones):
        state[STEP] = torch.zeros(1)
    load(state, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    for named, (value, *moments) in zip(named_ones, wholes, strict=True):
        if isinstance(trained, TrainedStage):
            named.parameter.copy_(value)
        part = trained.part_of(named.parameter)
        if part is None:
            continue
        cut = slice(part.start, part.start + part.value.numel())
        part.value.view(-1).copy_(value.reshape(-1)[cut])
        if part.states is not None:
            for name, values in zip(MOMENTS, moments, strict=True):
                local_part(_moment(part, name)).view(-1).copy_(values.reshape(-1)[cut])
            _step(part.states).copy_(state[STEP].view(()))


def _pieces(named: NamedParameter, name: str, shard: Tensor, tp: dist.ProcessGroup) -> Iterator[tuple[str, Tensor]]:
    """The matrices of a parameter by their names in a checkpoint, of which the ranks of ``tp`` hold a part each."""
    if named.dim < 0:
        yield f"{named.key}.{name}", shard
        return
    mesh = DeviceMesh.from_group(tp, "cpu")
    for number, piece in enumerate(shard.chunk(named.stride, named.dim)):
        key = f"{named.key}.{name}" + (f".{number}" if named.stride > 1 else "")
        yield key, DTensor.from_local(piece, mesh, [Shard(named.dim)], run_check=False)


def _moment(part: Part, name: str) -> Tensor:
    assert part.states is not None
    return part.states.setdefault(name, torch.zeros_like(part.owner))


def _step(states: dict[str, Tensor]) -> Tensor:
    return states.setdefault(STEP, torch.zeros((), dtype=torch.float32))
