"""Parameters by layout-independent names: initial values, shards, and full tensors put together from shards."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from entrain_bench.train.modules.stage import Stage

_WEIGHT_STD = 0.02  # GPT-2's, and megatron-core's default init_method_std


@dataclass(frozen=True, slots=True)
class NamedParameter:
    """A parameter of a stage.

    Attributes:
        key: ``module.layer.parameter``; both copies of a tied embedding have the input embedding's.
        parameter: this rank's shard.
        dim: the dimension that tensor parallelism splits; -1 for none.
        stride: pieces of each shard; pieces of all ranks interleave (2 for gate and up of a gated MLP).
        tp: tensor parallel degree.
        tp_rank: place among the tensor parallel ranks.
    """

    key: str
    parameter: Parameter
    dim: int
    stride: int
    tp: int
    tp_rank: int

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of this rank's shard; FSDP's parameters, too, have that of all their parts."""
        return tuple(self.parameter.shape)

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        shape = list(self.shard_shape)
        if self.dim >= 0:
            shape[self.dim] *= self.tp
        return tuple(shape)

    def shard(self, full: Tensor) -> Tensor:
        """This rank's shard of a full tensor."""
        if self.dim < 0:
            return full
        return torch.cat(full.chunk(self.stride * self.tp, self.dim)[self.tp_rank :: self.tp], self.dim)

    def assemble(self, shards: Sequence[Tensor]) -> Tensor:
        """The full tensor, from the shards (of values or gradients) of all tensor parallel ranks in order."""
        if self.dim < 0:
            return shards[0]
        pieces = [shard.chunk(self.stride, self.dim) for shard in shards]
        return torch.cat([piece for row in zip(*pieces, strict=True) for piece in row], self.dim)


def named_parameters(stage: Stage) -> Iterator[NamedParameter]:
    """The parameters of a stage by key."""
    tied = stage.tied_embedding()
    tp, tp_rank = stage.groups.tp.size(), stage.groups.tp.rank()
    for name, parameter in stage.named_parameters():
        key = "0.words.weight" if parameter is tied else name.removeprefix("layers.")
        # megatron-core marks the parameters that it splits, and they alone have these attributes.
        dim, stride = getattr(parameter, "partition_dim", -1), getattr(parameter, "partition_stride", 1)
        yield NamedParameter(f"{stage.module.name}.{key}", parameter, dim, stride, tp, tp_rank)


@torch.no_grad()
def initialise(stage: Stage, seed: int) -> None:
    """Set weights to normal numbers, norms to 1 and biases to 0, whatever the layout.

    Each parameter is drawn in full from a generator seeded by ``(seed, key)``, then sliced. CPUs and GPUs draw
    different numbers.
    """
    for named in named_parameters(stage):
        parameter = named.parameter
        if parameter.dim() == 1:
            parameter.fill_(0.0 if named.key.endswith("bias") else 1.0)
            continue
        digest = hashlib.sha256(f"{seed}/{named.key}".encode()).digest()
        generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(digest[:7]))
        full = torch.empty(named.full_shape, device=parameter.device).normal_(0.0, _WEIGHT_STD, generator=generator)
        parameter.copy_(named.shard(full))
