"""Stages of the suite's own layers: their parameters and Adam's moments as tensors that any layout can read.

A tensor parallel parameter is a ``DTensor`` for each of its matrices (gate and up); data parallel ranks put the
optimizer's states together and take turns to write them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter

from entrain_bench.train.modules.ends import input_width
from entrain_bench.train.modules.packing import Pack, merge_tokens, shares_of
from entrain_bench.train.modules.stage import NamedParameter, Stage, named_parameters
from entrain_bench.train.running.learning import LearningStage, local_part

MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = "step"


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a parameter that a rank's optimizer updates and knows by ``owner``.

    ``value`` is consecutive numbers, in fp32 if it learns, from ``start`` of this rank's shard.
    """

    value: torch.Tensor
    start: int
    owner: torch.Tensor
    states: dict[str, torch.Tensor] | None


def read_into(state: Mapping[str, Tensor], path: Path) -> None:
    """Fill tensors with those of a checkpoint's folder; raises if one is missing or damaged."""
    load({**state}, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)


class OwnStage(LearningStage):
    """A learning stage of the suite's own layers, of whose parameters a rank has all or a part."""

    __slots__ = ()

    stage: Stage

    @abstractmethod
    def part_of(self, parameter: Parameter) -> Part | None:
        """The part of a parameter that this rank's optimizer updates; None if there is none."""

    @abstractmethod
    def cuts_states(self, parameter: Parameter) -> bool:
        """Whether replicas hold a part of a parameter's optimizer states each."""

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that this rank writes, fp32 on the CPU: parameters, moments, steps; collective."""
        groups = self.groups
        state: dict[str, Tensor] = {}
        for number, named in enumerate(named_parameters(self.stage)):
            # A rank that has nothing of a parameter takes part, too.
            part = self.part_of(named.parameter)
            names = ("value", *MOMENTS) if named.parameter.requires_grad else ("value",)
            if part is not None and part.states is not None:
                state[STEP] = step_of(part.states).detach().cpu().view(1)
            whole = self._whole(named, part, len(names)).cpu()
            is_second = self.stage.held.start > 0 and named.key == f"{self.stage.module.name}.0.words.weight"
            sharing = groups.sharing_of(named.parameter)
            writes = number % sharing.size() == sharing.rank() and (named.dim >= 0 or groups.tp.rank() == 0)
            if writes and not is_second:
                for name, values in zip(names, whole, strict=True):
                    state |= dict(_pieces(named, name, values, groups.tp))
        return state

    def _whole(self, named: NamedParameter, part: Part | None, count: int) -> Tensor:
        """Value and moments of this rank's tensor parallel shard of a parameter ``[count, *shape]``."""
        shape = (count, *named.parameter.shape)
        held = [] if part is None else [part.value]
        if part is not None and part.states is not None:
            held += [local_part(moment(part.states, part.owner, name)) for name in MOMENTS]
        if not self.cuts_states(named.parameter):
            return torch.stack([rows.detach() for rows in held]).view(shape)
        # Summed as integers: every bit of a sum with zeros is that of the one part, also of a negative zero.
        flat = torch.zeros(shape, dtype=torch.float32, device=named.parameter.device).view(count, -1)
        if part is not None:
            flat[:, part.start : part.start + part.value.numel()] = torch.stack(
                [rows.detach().view(-1) for rows in held]
            )
        dist.all_reduce(flat.view(torch.int32), group=self.groups.sharing_of(named.parameter))
        return flat.view(shape)

    @torch.no_grad()
    def load(self, path: Path) -> None:
        """Read a stage; optimizer states that do not exist yet are made. Raises if a tensor is missing or damaged."""
        wholes: list[Tensor] = []
        state: dict[str, Tensor] = {}
        named_ones = list(named_parameters(self.stage))
        for named in named_ones:
            names = ("value", *MOMENTS) if named.parameter.requires_grad else ("value",)
            wholes.append(torch.full((len(names), *named.parameter.shape), torch.nan))
            for name, values in zip(names, wholes[-1], strict=True):
                state |= dict(_pieces(named, name, values, self.groups.tp))
        if any(named.parameter.requires_grad for named in named_ones):
            state[STEP] = torch.zeros(1)
        read_into(state, path)
        for named, (value, *moments) in zip(named_ones, wholes, strict=True):
            if not isinstance(named.parameter, DTensor):
                named.parameter.copy_(value)
            part = self.part_of(named.parameter)
            if part is None:
                continue
            cut = slice(part.start, part.start + part.value.numel())
            part.value.view(-1).copy_(value.reshape(-1)[cut])
            if part.states is not None:
                for name, values in zip(MOMENTS, moments, strict=True):
                    local_part(moment(part.states, part.owner, name)).view(-1).copy_(values.reshape(-1)[cut])
                step_of(part.states).copy_(state[STEP].view(()))

    def empty_pass(self, remade: int, example: Callable[[], Any]) -> Iterator[None]:  # noqa: ARG002
        """A pass of one token whose label does not count."""
        stage = self.stage
        module = stage.module
        first = next(stage.parameters())
        if module.is_encoder:
            pack = Pack((merge_tokens(module),), (1,), remade=remade)
        else:
            pack = Pack((1,), (), torch.zeros(1, dtype=torch.int64), torch.tensor([-1]), remade=remade)
        if stage.held.start:
            shape = shares_of(pack.lengths, self.groups).hidden.size, module.config.hidden_size
        elif module.is_encoder:
            shape = sum(pack.lengths), input_width(module)
        else:
            # No projected tokens, but a backward as in other replicas if encoders learn.
            shape = 0, module.config.hidden_size
        leaf = torch.zeros(shape, device=first.device, dtype=first.dtype, requires_grad=stage.passes_gradients)
        output = self.forward(leaf, pack)
        yield
        if output.requires_grad:
            self.backward(get_gradient_edge(output), torch.zeros_like(output), leaf)
        yield


def _pieces(named: NamedParameter, name: str, shard: Tensor, tp: dist.ProcessGroup) -> Iterator[tuple[str, Tensor]]:
    """The matrices of a parameter by their names in a checkpoint, of which the ranks of ``tp`` hold a part each."""
    if named.dim < 0:
        yield f"{named.key}.{name}", shard
        return
    mesh = DeviceMesh.from_group(tp, "cpu")
    for number, piece in enumerate(shard.chunk(named.stride, named.dim)):
        key = f"{named.key}.{name}" + (f".{number}" if named.stride > 1 else "")
        yield key, DTensor.from_local(piece, mesh, [Shard(named.dim)], run_check=False)


def moment(states: dict[str, Tensor], owner: Tensor, name: str) -> Tensor:
    """A moment of a parameter, made if there was no step yet."""
    return states.setdefault(name, torch.zeros_like(owner))


def step_of(states: dict[str, Tensor]) -> Tensor:
    """A parameter's number of steps, made if there was none."""
    return states.setdefault(STEP, torch.zeros((), dtype=torch.float32))
