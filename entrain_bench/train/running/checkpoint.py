"""Checkpoints of a training run: weights, optimizer states and the iteration, with torch.distributed.checkpoint.

The sampler needs no state: batches follow from seed and iteration. A checkpoint counts once its ``meta.json`` is there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from entrain_bench.errors import ExecutionError, UserError
from entrain_bench.files import write_atomically
from entrain_bench.train.running.sharded import ShardedStage
from entrain_bench.train.running.step import TrainedStage

META = "meta.json"
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The checkpoints of one run in a folder; the last one is kept.

    Attributes:
        folder: where they are.
        identity: what a checkpoint must share with the run: model, layout, seed and so on, by name.
    """

    folder: Path
    identity: Mapping[str, str]

    def latest(self) -> tuple[Path, list[dict[str, float]]] | None:
        """The newest whole checkpoint and the metrics of the iterations behind it.

        Raises:
            UserError: if it is damaged, or of another model, layout or run.
        """
        found = sorted(self.folder.glob(f"iteration_*/{META}"))
        if not found:
            return None
        try:
            meta: dict[str, Any] = json.loads(found[-1].read_text())
            stored, history = dict(meta["identity"]), [dict(row) for row in meta["history"]]
        except (ValueError, KeyError, TypeError) as error:
            raise self._damaged(found[-1].parent) from error
        for name, value in self.identity.items():
            if stored.get(name) != value:
                raise UserError(
                    f"harness.checkpoint_dir={self.folder}: its checkpoint is of another {name} "
                    f"({_short(stored.get(name))}; this run has {_short(value)}); choose another folder"
                )
        return found[-1].parent, history

    def save(
        self, iteration: int, stages: Mapping[tuple[int, int], TrainedStage | ShardedStage], history: list[Any]
    ) -> None:
        """Write the state after ``iteration`` iterations and drop older ones; collective. The history is rank 0's.

        Raises:
            ExecutionError: if the folder cannot be written.
        """
        path = self.folder / f"iteration_{iteration:08d}"
        for trained in stages.values():
            trained.gather_weights()
        try:
            save(state_of(stages), checkpoint_id=str(path))
        except CheckpointException as error:
            cause, _ = next(iter(error.failures.values()))
            raise ExecutionError(f"harness.checkpoint_dir={self.folder}: cannot be written ({cause})") from error
        dist.barrier()
        if dist.get_rank() == 0:
            meta = {"identity": dict(self.identity), "iteration": iteration, "history": history}
            write_atomically(path / META, json.dumps(meta).encode())
            for old in sorted(self.folder.glob("iteration_*")):
                if old != path:
                    shutil.rmtree(old)

    def load(self, path: Path, stages: Mapping[tuple[int, int], TrainedStage | ShardedStage]) -> None:
        """Read a state into the stages; collective.

        Raises:
            UserError: if files are missing or damaged.
        """
        state = state_of(stages)
        try:
            load(state, checkpoint_id=str(path))
        except (Exception, CheckpointException) as error:
            raise self._damaged(path) from error

    def _damaged(self, path: Path) -> UserError:
        return UserError(f"harness.checkpoint_dir={self.folder}: damaged checkpoint {path.name}; remove it")


def state_of(stages: Mapping[tuple[int, int], TrainedStage | ShardedStage]) -> dict[str, Tensor]:
    """All tensors of this rank's state by a name that replicas of the same tensor share.

    Optimizer states that do not exist yet are made, so that the same call serves saving and loading.
    """
    state: dict[str, Tensor] = {}
    for (module, stage), trained in stages.items():
        groups = trained.groups
        where = f"module{module}.stage{stage}.tp{groups.tp.rank()}"
        if isinstance(trained, ShardedStage):
            state |= trained.state(where)
            continue
        for name, parameter in trained.stage.named_parameters():
            state[f"{where}.weights.{name}"] = parameter.data
        distributed = trained.buffers.ddp_config.use_distributed_optimizer
        shard = groups.dp_cp.rank() if distributed else 0
        inner = trained.optimizer.optimizer
        for group_index, group in enumerate(inner.param_groups):
            for index, parameter in enumerate(group["params"]):
                own = f"{where}.shard{shard}.group{group_index}.{index}"
                states = inner.state[parameter]
                for moment in MOMENTS:
                    states.setdefault(moment, torch.zeros_like(parameter))
                states.setdefault("step", torch.zeros((), dtype=torch.float32))
                state[f"{own}.master"] = parameter.data
                state |= {f"{own}.{name}": states[name] for name in (*MOMENTS, "step")}
    return state


def _short(text: str | None, most: int = 120) -> str:
    text = str(text)
    return text if len(text) <= most else text[: most - 3] + "..."
