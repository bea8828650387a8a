"""A stage computed with more tensor parallel ranks than its weights are split over: by slices of each rank's weights.

Gradients of all ranks are summed once; parameters that every rank uses whole count once, not once a rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from entrain_bench.train.modules.packing import StageGroups
from entrain_bench.train.modules.stage import NamedParameter, Stage, named_parameters


@dataclass(frozen=True, slots=True)
class Slice:
    """A parameter ``name`` of ``owner`` in a sliced stage, a shard of ``holder``'s; ``copies`` ranks compute it."""

    owner: torch.nn.Module
    name: str
    named: NamedParameter
    holder: torch.nn.Module
    copies: int

    def take(self) -> None:
        """Slice the weights as they are now; a view of them where it can be."""
        whole = self.holder._parameters[self.name]
        assert whole is not None
        value = self.named.shard(whole)
        if self.copies > 1 and value.requires_grad:
            value = _CountedOnce.apply(value, self.copies)  # type: ignore[no-untyped-call]
        # As ``torch.func.functional_call`` puts tensors in the place of parameters.
        self.owner._parameters[self.name] = value  # type: ignore[assignment]


@dataclass(slots=True)
class SlicedStage:
    """A stage whose parameters are slices of another's, taken once an iteration."""

    stage: Stage
    slices: tuple[Slice, ...]
    is_fresh: bool = False

    def take(self) -> Stage:
        """The stage with slices of the weights as they were at the first call since ``forget``."""
        for piece in () if self.is_fresh else self.slices:
            piece.take()
        self.is_fresh = True
        return self.stage

    def forget(self) -> None:
        """Have the next ``take`` slice again: weights have changed."""
        self.is_fresh = False


def slice_stage(whole: Stage, groups: StageGroups) -> SlicedStage:
    """The stage for wider groups, without weights of its own."""
    with torch.device("meta"):
        stage = Stage(
            whole.module,
            whole.held,
            groups,
            dtype=whole.config.params_dtype,
            recompute=whole.recompute,
            attention=whole.attention,
        )
    stage.config.calculate_per_token_loss = True
    place = groups.tp.rank() // groups.weights_tp
    every = (replace(shard, tp=groups.slices, tp_rank=place) for shard in named_parameters(stage))
    named = {id(shard.parameter): shard for shard in every}
    holders = dict(whole.named_modules())
    parts = dict(stage.named_modules())
    slices = []
    for path, parameter in stage.named_parameters():
        owner, _, name = path.rpartition(".")
        partial = named[id(parameter)].dim >= 0 or getattr(parameter, "sequence_parallel", False)
        copies = 1 if partial else groups.slices
        slices.append(Slice(parts[owner], name, named[id(parameter)], holders[owner], copies))
    return SlicedStage(stage, tuple(slices))


def slice_stages(whole: Stage, widths: Mapping[int, StageGroups]) -> dict[int, SlicedStage]:
    """The stages of groups with a wider TP, by TP."""
    wider = {groups.tp.size(): groups for groups in widths.values() if groups.tp.size() != whole.groups.tp.size()}
    return {tp: slice_stage(whole, groups) for tp, groups in wider.items()}


class _CountedOnce(torch.autograd.Function):
    """The parameter; its gradient is divided among the ranks that compute it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, copies: int) -> Tensor:
        ctx.copies = copies
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return gradient / ctx.copies, None
