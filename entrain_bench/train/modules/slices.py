"""A stage computed with more tensor parallel ranks than its weights are split over: by slices of each rank's weights.

Weights that FSDP gathers are sliced as each layer begins, others once an iteration. Gradients of all ranks are summed
once; parameters that every rank uses whole count once, not once a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from entrain_bench.train.modules.blocks import Block
from entrain_bench.train.modules.ends import LanguageHead
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
    slices: Mapping[str, tuple[Slice, ...]]
    is_fresh: bool = False

    def run(self, index: str, holder: torch.nn.Module, *inputs: Any, **options: Any) -> Any:
        """Run a layer with slices of the weights that the same layer of another stage, ``holder``, has now."""
        for piece in self.slices[index]:
            piece.take()
        layer = self.stage.layers[index]
        if isinstance(layer, Block):
            layer.remakes_mlp = holder.remakes_mlp  # type: ignore[assignment]
        if isinstance(layer, LanguageHead) and inputs[-1] is not None:
            inputs = (*inputs[:-1], self.stage.tied_embedding())
        return layer(*inputs, **options)

    def take(self) -> Stage:
        """The stage with slices of the weights as they were at the first call since ``forget``."""
        for piece in () if self.is_fresh else chain(*self.slices.values()):
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
    slices: dict[str, tuple[Slice, ...]] = dict.fromkeys(stage.layers, ())
    for path, parameter in stage.named_parameters():
        owner, _, name = path.rpartition(".")
        partial = named[id(parameter)].dim >= 0 or getattr(parameter, "sequence_parallel", False)
        copies = 1 if partial else groups.slices
        _, index, *_ = path.split(".")
        slices[index] += (Slice(parts[owner], name, named[id(parameter)], holders[owner], copies),)
    return SlicedStage(stage, slices)


def slice_stages(whole: Stage, widths: Mapping[int, StageGroups]) -> dict[int, SlicedStage]:
    """The stages of groups with a wider TP, by TP."""
    wider = {groups.tp.size(): groups for groups in widths.values() if groups.tp.size() != whole.groups.tp.size()}
    return {tp: slice_stage(whole, groups) for tp, groups in wider.items()}


def slice_layers(whole: Stage, sliced: Mapping[int, SlicedStage]) -> None:
    """Have each layer of a stage run as a sliced stage's, by TP, where more ranks share a chunk than hold weights."""
    for index, layer in whole.layers.items():
        layer.forward = partial(_as_shared, layer, layer.forward, index, sliced)


def _as_shared(
    layer: torch.nn.Module,
    own: Callable[..., Any],
    index: str,
    sliced: Mapping[int, SlicedStage],
    *inputs: Any,
    **options: Any,
) -> Any:
    shares = options["attention_mask"].shares if options else inputs[2]
    other = sliced.get(shares.tp.size())
    return other.run(index, layer, *inputs, **options) if other else own(*inputs, **options)


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
