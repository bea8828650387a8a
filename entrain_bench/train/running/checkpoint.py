"""Checkpoints of a training run: weights, optimizer states and the iteration, as safetensors and JSON.

They hold whole tensors (``boxes``), so a run goes on under any layout, by any strategy. The sampler needs no state:
batches follow from seed and iteration. A checkpoint counts once its ``meta.json`` is there, which says where all is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from entrain_bench.base.errors import ExecutionError, UserError
from entrain_bench.base.files import write_atomically
from entrain_bench.train.modules import named_parameters
from entrain_bench.train.running.boxes import Box, Boxes, Index, boxes_of, read_boxes, write_boxes
from entrain_bench.train.running.sharded import ShardedStage, local_part
from entrain_bench.train.running.step import TrainedStage

META = "meta.json"
FORMAT = "entrain-bench checkpoint 3"
MOMENTS = ("exp_avg", "exp_avg_sq")
# Nothing else of a folder is removed with a checkpoint.
_FILES = (META, "rank_*.safetensors")
_DIGITS = 8

Stages = Mapping[tuple[int, int], TrainedStage | ShardedStage]


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint's folder and what it holds where.

    ``history`` has metrics of the iterations behind it; the first ``num_elsewhere`` ran under another layout or
    strategy.
    """

    path: Path
    index: Index
    history: list[dict[str, float]]
    num_elsewhere: int


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The checkpoints of one run in a folder; the last one is kept, and what else is in the folder stays.

    A checkpoint must share ``identity`` with the run (model, seed and so on, by name), but not ``setup``, on which
    metrics depend (layout and strategy). ``control`` is of all ranks.
    """

    folder: Path
    identity: Mapping[str, str]
    setup: Mapping[str, str]
    control: dist.ProcessGroup

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
            stored, index = dict(meta["identity"]), dict(meta["tensors"])
            history = [dict(row) for row in meta["history"]]
            num_elsewhere = len(history) if meta["setup"] != dict(self.setup) else int(meta["num_elsewhere"])
        except (ValueError, KeyError, TypeError) as error:
            raise self._damaged(path) from error
        for name, value in self.identity.items():
            if stored.get(name) != value:
                raise UserError(
                    f"harness.checkpoint_dir={self.folder}: its checkpoint is of another {name} "
                    f"({_short(stored.get(name))}; this run has {_short(value)}); choose another folder"
                )
        return Saved(path, index, history, num_elsewhere)

    def save(self, iteration: int, stages: Stages, history: list[Any], num_elsewhere: int) -> None:
        """Write the state after ``iteration`` iterations and drop older ones; collective. The history is rank 0's.

        Raises:
            ExecutionError: if the folder cannot be written.
        """
        path = self.folder / f"iteration_{iteration:0{_DIGITS}d}"
        for trained in stages.values():
            trained.gather_weights()
        try:
            path.mkdir(parents=True, exist_ok=True)
            index = write_boxes(path, state_of(stages), self.control)
        except (OSError, SafetensorError) as error:
            raise ExecutionError(f"harness.checkpoint_dir={self.folder}: cannot be written ({error})") from error
        dist.barrier()
        if dist.get_rank() == 0:
            meta = {
                "format": FORMAT,
                "identity": dict(self.identity),
                "setup": dict(self.setup),
                "num_elsewhere": num_elsewhere,
                "iteration": iteration,
                "history": history,
                "tensors": index,
            }
            write_atomically(path / META, json.dumps(meta).encode())
            for old, _ in self._own():
                if old != path:
                    _remove(old)

    def load(self, saved: Saved, stages: Stages) -> None:
        """Read a state into the stages; collective.

        Raises:
            UserError: if files are missing or damaged.
        """
        stepped = state_of(stages), state_of(stages, second=True)
        weights = (_weights(stages, second=second) for second in (False, True))
        try:
            read_boxes(saved.path, saved.index, (*stepped, *weights))
        except Exception as error:
            raise self._damaged(saved.path) from error
        for state in stepped:
            for states in _optimizer_states(stages) if "step" in state else ():
                states["step"].copy_(state["step"].boxes[0].values[0])

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


def _weights(stages: Stages, *, second: bool) -> dict[str, Boxes]:
    """Weights that optimizers have no view of; read from the same values."""
    weights: dict[str, Boxes] = {}
    for trained in stages.values():
        for named in named_parameters(trained.stage) if isinstance(trained, TrainedStage) else ():
            part, own = trained.part_of(named.parameter), named.parameter.data
            whole = part is not None and (part.value.data_ptr(), part.value.numel()) == (own.data_ptr(), own.numel())
            if _is_second(trained, named.key) == second and not whole:
                weights[f"{named.key}.value"] = boxes_of(named, own, 0)
    return weights


def state_of(stages: Stages, *, second: bool = False) -> dict[str, Boxes]:
    """What a checkpoint holds, by a name that replicas of the same tensor share, and this rank's boxes of it.

    Parameters in fp32, whatever the model's type, their moments, and the number of optimizer steps. States that do not
    exist yet are made, so that the same call serves saving and loading. The second copy of a tied embedding is left
    out, or is all there is.
    """
    state: dict[str, Boxes] = {}
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
                state[f"{named.key}.{moment}"] = boxes_of(named, local_part(values), part.start)
            step = part.states.setdefault("step", torch.zeros((), dtype=torch.float32))
            state["step"] = Boxes((1,), [Box((0,), step.reshape(1).clone())])
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
