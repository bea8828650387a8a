"""Sums of gradients over the ranks that hold a parameter, and the norm over the whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

BUCKET_NUMBERS = 2**25  # numbers that are summed at once

type Ranks = tuple[int, ...]


@dataclass(slots=True)
class Gradients:
    """Sets of ranks that add up the gradients of this rank's parameters, by the model's names."""

    groups: Mapping[Ranks, dist.ProcessGroup]
    device: torch.device
    sums: dict[str, Ranks] = field(default_factory=dict)
    partial: dict[str, Ranks] = field(default_factory=dict)  # ranks of a tensor parallel group with a part each
    copied: dict[str, int] = field(default_factory=dict)  # number of ranks of such a group that have it whole
    sharded: list[FSDPModule] = field(default_factory=list)  # modules whose gradients FSDP2 sums

    def add_up(self, named: Mapping[str, Parameter]) -> None:
        """Add up all gradients; zeros where this rank has none. Collective."""
        for parameter in named.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._all_reduce({name: self.partial[name] for name in named if name in self.partial}, named)
        sharded = self._sharded()
        self._all_reduce({name: self.sums[name] for name in named if named[name] not in sharded}, named)

    def norm(self, named: Mapping[str, Parameter]) -> float:
        """The norm of all gradients of the model; collective."""
        sharded = self._sharded()
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        for name, parameter in named.items():
            copies = 1 if parameter in sharded else len(self.sums[name]) * self.copied.get(name, 1)
            square += local_part(parameter.grad).double().square().sum() / copies
        dist.all_reduce(square)
        return float(square.sqrt())

    def _sharded(self) -> set[Parameter]:
        return {parameter for part in self.sharded for parameter in part.parameters()}  # type: ignore[attr-defined]

    def _all_reduce(self, ranks_of: Mapping[str, Ranks], named: Mapping[str, Parameter]) -> None:
        by_group: dict[Ranks, list[Tensor]] = {}
        for name, ranks in ranks_of.items():
            if len(ranks) > 1:
                by_group.setdefault(ranks, []).append(local_part(named[name].grad))
        for ranks in sorted(by_group):
            bucket: list[Tensor] = []
            for gradient in by_group[ranks]:
                bucket.append(gradient)
                if sum(each.numel() for each in bucket) >= BUCKET_NUMBERS:
                    self._sum_bucket(bucket, ranks)
                    bucket = []
            self._sum_bucket(bucket, ranks)

    def _sum_bucket(self, bucket: Sequence[Tensor], ranks: Ranks) -> None:
        if not bucket:
            return
        flat = torch.cat([each.reshape(-1) for each in bucket])
        dist.all_reduce(flat, group=self.groups[ranks])
        for each, summed in zip(bucket, torch.split_with_sizes(flat, [each.numel() for each in bucket]), strict=True):
            each.copy_(summed.view_as(each))


def local_part(tensor: Tensor | None) -> Tensor:
    """This rank's part of a gradient."""
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
