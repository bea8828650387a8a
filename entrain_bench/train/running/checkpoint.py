"""Checkpoints of a training run: weights, optimizer states and the iteration, with torch.distributed.checkpoint.

They hold whole tensors (``boxes``), so a run goes on under any layout, by any strategy. The sampler needs no state:
batches follow from seed and iteration. A checkpoint counts once its ``meta.json`` is there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from entrain_bench.base.errors import ExecutionError, UserError
from entrain_bench.base.files import write_atomically
from entrain_bench.train.modules import named_parameters
from entrain_bench.train.running.boxes import boxes_of
from entrain_bench.train.running.metadata import METADATA, check_metadata
from entrain_bench.train.running.sharded import ShardedStage
from entrain_bench.train.running.step import TrainedStage

META = "meta.json"
FORMAT = "entrain-bench checkpoint 2"
MOMENTS = ("exp_avg", "exp_avg_sq")
# What torch.distributed.checkpoint writes; nothing else of a folder is removed with a checkpoint.
_FILES = (META, METADATA, "__*_*.distcp")
_DIGITS = 8

Stages = Mapping[tuple[int, int], TrainedStage | ShardedStage]


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint.

    Attributes:
        path: its folder.
        history: metrics of the iterations behind it.
        num_elsewhere: of them, the first ones, how many ran under another layout or strategy.
    """

    path: Path
    history: list[dict[str, float]]
    num_elsewhere: int


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The checkpoints of one run in a folder; the last one is kept, and what else is in the folder stays.

    Attributes:
        folder: where they are.
        identity: what a checkpoint must share with the run: model, seed and so on, by name.
        setup: what it need not, but what metrics depend on: layout and strategy, by name.
    """

    folder: Path
    identity: Mapping[str, str]
    setup: Mapping[str, str] = field(default_factory=dict)

    def latest(self) -> Saved | None:
        """The newest whole checkpoint.

        Raises:
            UserError: if it is damaged, or of another model or run.
        """
        found = self._own()
        if not found:
            return None
        path, meta = found[-1]
        try:
            stored, history = dict(meta["identity"]), [dict(row) for row in meta["history"]]
            num_elsewhere = len(history) if meta["setup"] != dict(self.setup) else int(meta["num_elsewhere"])
        except (ValueError, KeyError, TypeError) as error:
            raise self._damaged(path) from error
        for name, value in self.identity.items():
            if stored.get(name) != value:
                raise UserError(
                    f"harness.checkpoint_dir={self.folder}: its checkpoint is of another {name} "
                    f"({_short(stored.get(name))}; this run has {_short(value)}); choose another folder"
                )
        return Saved(path, history, num_elsewhere)

    def save(self, iteration: int, stages: Stages, history: list[Any], num_elsewhere: int = 0) -> None:
        """Write the state after ``iteration`` iterations and drop older ones; collective. The history is rank 0's.

        Raises:
            ExecutionError: if the folder cannot be written.
        """
        path = self.folder / f"iteration_{iteration:0{_DIGITS}d}"
        for trained in stages.values():
            trained.gather_weights()
        try:
            save(state_of(stages), checkpoint_id=str(path))
        except CheckpointException as error:
            cause, _ = next(iter(error.failures.values()))
            raise ExecutionError(f"harness.checkpoint_dir={self.folder}: cannot be written ({cause})") from error
        dist.barrier()
        if dist.get_rank() == 0:
            meta = {
                "format": FORMAT,
                "identity": dict(self.identity),
                "setup": dict(self.setup),
                "num_elsewhere": num_elsewhere,
                "iteration": iteration,
                "history": history,
            }
            write_atomically(path / META, json.dumps(meta).encode())
            for old, _ in self._own():
                if old != path:
                    _remove(old)

    def load(self, path: Path, stages: Stages) -> None:
        """Read a state into the stages; collective.

        Raises:
            UserError: if files are missing or damaged, or would run code.
        """
        try:
            check_metadata(path)
            stepped = state_of(stages), _state(stages, second=True)
            for state in (*stepped, *(_weights(stages, second=second) for second in (False, True))):
                load(state, checkpoint_id=str(path))
            for state in stepped:
                for states in _optimizer_states(stages) if "step" in state else ():
                    states["step"].copy_(state["step"])
        except (Exception, CheckpointException) as error:
            raise self._damaged(path) from error

    def _own(self) -> list[tuple[Path, dict[str, Any]]]:
        """Whole checkpoints of this format, the oldest first, with what their ``meta.json`` says."""
        found = []
        for file in sorted(self.folder.glob(f"iteration_{'[0-9]' * _DIGITS}/{META}")):
            try:
                meta = dict(json.loads(file.read_text()))
            except (ValueError, TypeError, OSError) as error:
                raise self._damaged(file.parent) from error
            if meta.get("format") == FORMAT:
                found.append((file.parent, meta))
            elif "identity" in meta:
                raise UserError(
                    f"harness.checkpoint_dir={self.folder}: {file.parent.name} is of another version; "
                    "choose another folder"
                )
        return found

    def _damaged(self, path: Path) -> UserError:
        return UserError(f"harness.checkpoint_dir={self.folder}: damaged checkpoint {path.name}; remove it")


def state_of(stages: Stages) -> dict[str, Tensor]:
    """What a checkpoint holds, by a name that replicas of the same tensor share, and this rank's boxes of it.

    Parameters in fp32, whatever the model's type, their moments, and the number of optimizer steps. States that do not
    exist yet are made, so that the same call serves saving and loading. The second copy of a tied embedding is left
    out.
    """
    return _state(stages, second=False)


def _weights(stages: Stages, *, second: bool) -> dict[str, Tensor]:
    """Weights that optimizers have no view of; read from the same values."""
    weights: dict[str, Tensor] = {}
    for trained in stages.values():
        for named in named_parameters(trained.stage) if isinstance(trained, TrainedStage) else ():
            part, own = trained.part_of(named.parameter), named.parameter.data
            whole = part is not None and (part.value.data_ptr(), part.value.numel()) == (own.data_ptr(), own.numel())
            if _is_second(trained, named.key) == second and not whole:
                weights[f"{named.key}.value"] = boxes_of(named, own, 0)
    return weights


def _state(stages: Stages, *, second: bool) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for trained in stages.values():
        for named in named_parameters(trained.stage):
            if _is_second(trained, named.key) != second:
                continue
            part = trained.part_of(named.parameter)
            if part is None:
                continue
            state[f"{named.key}.value"] = boxes_of(named, part.value, part.start)
            if part.states is None:
                continue
            for moment in MOMENTS:
                values = part.states.setdefault(moment, torch.zeros_like(part.owner))
                state[f"{named.key}.{moment}"] = boxes_of(named, _local(values), part.start)
            step = part.states.setdefault("step", torch.zeros((), dtype=torch.float32))
            state["step"] = step.clone()
    return state


def _optimizer_states(stages: Stages) -> Iterable[dict[str, Tensor]]:
    for trained in stages.values():
        for named in named_parameters(trained.stage):
            part = trained.part_of(named.parameter)
            if part is not None and part.states is not None:
                yield part.states


def _is_second(trained: TrainedStage | ShardedStage, key: str) -> bool:
    """Whether a parameter is the copy of a tied embedding that the last stage has."""
    return trained.stage.held.start > 0 and key == f"{trained.stage.module.name}.0.words.weight"


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _remove(path: Path) -> None:
    """Remove a checkpoint's own files, the one that makes it count first, and its folder if nothing else is there."""
    for pattern in _FILES:
        for file in path.glob(pattern):
            file.unlink()
    if not any(path.iterdir()):
        path.rmdir()


def _short(text: str | None, most: int = 120) -> str:
    text = str(text)
    return text if len(text) <= most else text[: most - 3] + "..."
