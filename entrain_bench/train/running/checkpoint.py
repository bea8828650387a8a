"""Checkpoints of a training run: weights, optimizer states and the iteration, as safetensors and JSON.

They hold whole tensors (``boxes``), so a run goes on under any layout, by any strategy. The sampler needs no state:
batches follow from seed and iteration. A checkpoint counts once its ``meta.json`` is there, which says where all is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from entrain_bench.base.errors import ExecutionError, UserError, require
from entrain_bench.base.files import write_atomically
from entrain_bench.train.modules import named_parameters
from entrain_bench.train.running.boxes import Box, Boxes, boxes_of, read_boxes, write_boxes
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
class Checkpoints:
    """The checkpoints of one run in a folder; the last one is kept, and what else is in the folder stays.

    A checkpoint must share ``identity`` with the run (model, seed and so on, by name), but not ``setup``, on which
    metrics depend (layout and strategy). ``control`` is of all ranks.
    """

    folder: Path
    identity: Mapping[str, str]
    setup: Mapping[str, str]
    control: dist.ProcessGroup

    def resume(self, stages: Stages, iterations: int) -> tuple[list[dict[str, float]], int]:
        """Read the newest whole checkpoint into the stages, if there is one; collective.

        Returns:
            Metrics of the iterations behind it, and how many of them, the first ones, had another setup.

        Raises:
            UserError: if it is damaged, of another model or run, or beyond the run's iterations.
        """
        found = self._own()
        if not found:
            return [], 0
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
        require(iterations >= len(history), "iterations", iterations, f"at least the {len(history)} of the checkpoint")
        try:
            read_boxes(path, index, state_of(stages, all_copies=True))
        except Exception as error:
            raise self._damaged(path) from error
        return history, num_elsewhere

    def save(self, iteration: int, stages: Stages, history: list[Any], num_elsewhere: int) -> None:
        """Write the state after an iteration, drop older ones; collective. ``ExecutionError`` if it cannot."""
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


def state_of(stages: Stages, *, all_copies: bool = False) -> dict[str, Boxes]:
    """What a checkpoint holds, by a name that replicas of the same tensor share, and this rank's boxes of it.

    Parameters in fp32, whatever the model's type, their moments, and the number of optimizer steps. States that do not
    exist yet are made, so that the same call serves saving and loading. With ``all_copies`` the second copy of a tied
    embedding is there, too, and weights that the optimizer has no view of, which are read from the same values.
    """
    state: dict[str, Boxes] = {}

    def hold(name: str, held: Boxes) -> None:
        state.setdefault(name, Boxes(held.shape, [])).boxes.extend(held.boxes)

    for trained in stages.values():
        for named in named_parameters(trained.stage):
            part, own = trained.part_of(named.parameter), named.parameter.data
            is_second = trained.stage.held.start > 0 and named.key == f"{trained.stage.module.name}.0.words.weight"
            if is_second and not all_copies:
                continue
            if all_copies and isinstance(trained, TrainedStage):
                hold(f"{named.key}.value", boxes_of(named, own, 0))
            if part is None:
                continue
            hold(f"{named.key}.value", boxes_of(named, part.value, part.start))
            if part.states is None:
                continue
            for moment in MOMENTS:
                values = part.states.setdefault(moment, torch.zeros_like(part.owner))
                hold(f"{named.key}.{moment}", boxes_of(named, local_part(values), part.start))
            step = part.states.setdefault("step", torch.zeros((), dtype=torch.float32))
            hold("step", Boxes((1,), [Box((0,), step.view(1))]))
    return state


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
