"""A stage computed with more tensor parallel ranks than its weights are split over: by slices of each rank's weights.

Gradients flow back into these weights, where those of all ranks are summed once. A slice's gradient is that of its
rank alone; parameters that every rank uses whole count once, not once a rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from entrain_bench.train.modules.build import NamedParameter, named_parameters
from entrain_bench.train.modules.packing import StageGroups
from entrain_bench.train.modules.stage import Stage


@dataclass(frozen=True, slots=True)
class Slice:
    """A parameter of a sliced stage: where it stands, what it is a slice of, and how often ranks compute it.

    Attributes:
        owner, name: the part of the sliced stage that has it, and its name there.
        named: which shard it is.
        whole: the parameter of the stage that holds the weights.
        copies: ranks that each compute its whole gradient.
    """

    owner: torch.nn.Module
    name: str
    named: NamedParameter
    whole: Parameter
    copies: int

    def take(self) -> None:
        """Slice the weights as they are now; a view of them where it can be."""
        value = self.named.shard(self.whole)
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
        for each in () if self.is_fresh else self.slices:
            each.take()
        self.is_fresh = True
        return self.stage

    def forget(self) -> None:
        """Have the next ``take`` slice again: weights have changed."""
        self.is_fresh = False


def slice_stage(whole: Stage, groups: StageGroups) -> SlicedStage:
    """The stage for wider groups: it has no weights of its own.

    Args:
        whole: holds the weights, of a language model or not split.
        groups: those of the wider group.
    """
    with torch.device("meta"):
        stage = Stage(
            whole.module,
            whole.held,
            groups,
            dtype=whole.config.params_dtype,
            recompute=whole.recompute,
            attention=whole.attention,
            logit_chunk_tokens=whole.logit_chunk_tokens,
        )
    stage.config.calculate_per_token_loss = True
    place = groups.tp.rank() // groups.weights_tp
    every = (replace(each, tp=groups.slices, tp_rank=place) for each in named_parameters(stage))
    named = {id(each.parameter): each for each in every}
    of_whole, parts = dict(whole.named_parameters()), dict(stage.named_modules())
    slices = []
    for path, parameter in stage.named_parameters():
        owner, _, name = path.rpartition(".")
        partial = named[id(parameter)].dim >= 0 or getattr(parameter, "sequence_parallel", False)
        copies = 1 if partial else groups.slices
        slices.append(Slice(parts[owner], name, named[id(parameter)], of_whole[path], copies))
    return SlicedStage(stage, tuple(slices))


class _CountedOnce(torch.autograd.Function):
    """The parameter itself; of its gradient an equal share for each of the ranks that compute it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, copies: int) -> Tensor:
        ctx.copies = copies
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return gradient / ctx.copies, None
