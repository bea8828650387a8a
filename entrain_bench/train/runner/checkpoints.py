"""Checkpoints of a runner and its optimizer by torch.distributed.checkpoint, which any other layout can read."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from entrain_bench.base.errors import UserError
from entrain_bench.train.runner.runner import ProgramRunner

DIGITS = 8


def save_checkpoint(folder: str | Path, runner: ProgramRunner, optimizer: Optimizer, iteration: int) -> None:
    """Write the state after ``iteration`` iterations, then remove older ones; collective.

    A folder has its name once it is complete, so that a killed run leaves none that is not.
    """
    target = _folder(folder, iteration)
    partial = target.with_suffix(".partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
    dist.barrier()
    save(_state(runner, optimizer), checkpoint_id=partial)
    if dist.get_rank() == 0:
        partial.rename(target)
        for old in Path(folder).glob("iteration_*"):
            if old != target:
                shutil.rmtree(old)
    dist.barrier()


def resume(folder: str | Path, runner: ProgramRunner, optimizer: Optimizer) -> int:
    """Load the last checkpoint of a folder; returns its number of iterations, 0 if there is none. Collective.

    ``UserError`` if the checkpoint is of another model or optimizer.
    """
    found = [sorted(path.name for path in Path(folder).glob(f"iteration_{'[0-9]' * DIGITS}"))]
    dist.broadcast_object_list(found, 0)
    if not found[0]:
        return 0
    path = Path(folder) / found[0][-1]
    state = _state(runner, optimizer)
    try:
        load(state, checkpoint_id=path)
    except Exception as error:
        cause = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: is not a checkpoint of this model and optimizer ({cause})") from error
    return int(path.name.removeprefix("iteration_"))


def _folder(folder: str | Path, iteration: int) -> Path:
    return Path(folder) / f"iteration_{iteration:0{DIGITS}d}"


def _state(runner: ProgramRunner, optimizer: Optimizer) -> dict[str, Any]:
    """Parameters by the model's names and the optimizer's states, made if they do not exist; loading fills them."""
    state: dict[str, Any] = {}
    named = dict(runner.named_parameters())
    if not optimizer.state:
        _make_states(optimizer)
    for name, parameter in named.items():
        state[f"model.{name}"] = parameter.detach()
        states = optimizer.state[parameter]
        state |= {f"optimizer.{name}.{key}": value for key, value in states.items() if isinstance(value, torch.Tensor)}
    return state


def _make_states(optimizer: Optimizer) -> None:
    """Have an optimizer make its states by a step of zero, which changes nothing."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros(()) if isinstance(group["lr"], torch.Tensor) else 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad()
