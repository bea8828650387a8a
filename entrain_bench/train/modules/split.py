"""Backwards in two passes: gradients of inputs first, those of weights later (B and W of arXiv:2401.10241, section 2).

A product leaves its input and output gradient to the second pass; gradients of norms and biases wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import linear_with_frozen_weight
from megatron.core.utils import prepare_input_tensors_for_wgrad_compute
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import Parameter

# Start of the second pass, and the function that returns the gradient there.
Part = tuple[GradientEdge, Callable[[], Tensor]]


@dataclass(slots=True)
class WeightPass:
    """Weight gradients that a chunk's backward has deferred: parts of each, in the order of backward."""

    left: dict[Parameter, list[Part]] = field(default_factory=dict)

    @torch.no_grad()
    def run(self) -> None:
        """Add to the gradients, each parameter once, as its hooks expect, and free the inputs of each."""
        while self.left:
            parts = self.left.pop(next(iter(self.left)))
            torch.autograd.backward([begin for begin, _ in parts], [gradient() for _, gradient in parts])


@dataclass(slots=True)
class Splitter:
    """Shared by a stage's products: whether forwards lead to split backwards, and the parts that this one leaves."""

    on: bool = False
    _left: dict[Parameter, list[Part]] | None = None

    def backward_inputs(
        self, output: GradientEdge, gradient: Tensor, leaf: Tensor | None, parameters: Sequence[Parameter]
    ) -> tuple[Tensor | None, WeightPass]:
        """The first pass; returns the gradient of ``leaf``, and the rest."""
        self._left = left = dict[Parameter, list[Part]]()
        ahead = [] if leaf is None else [leaf]
        # Products are reached as inputs of the graph, and give their weights nothing.
        gradients = torch.autograd.grad([output], [*ahead, *parameters], [gradient], allow_unused=True)
        self._left = None
        known = zip(parameters, gradients[len(ahead) :], strict=True)
        small = {p: [_part_of_graph(get_gradient_edge(p), value)] for p, value in known if value is not None}
        assert small.keys().isdisjoint(left)
        # Small ones first: a bucket of gradients is sent off as soon as it has all of its own.
        return (gradients[0] if ahead else None), WeightPass(small | left)

    def cut(self, output: Tensor, weight: Parameter) -> Tensor:
        """An output that follows from a weight alone, whose backward is left to the second pass."""
        return self.later(output.detach(), weight, partial(_part_of_graph, get_gradient_edge(output)))

    def later(self, value: Tensor, weight: Parameter, part: Callable[..., Part], *kept: Tensor) -> Tensor:
        """Return the value; its backward defers the part computed from its gradient and ``kept`` to the second pass."""

        def put(gradient: Tensor, *kept: Tensor) -> None:
            assert self._left is not None, "a split backward runs in backward_inputs"
            self._left.setdefault(weight, []).append(part(gradient, *kept))

        return _Later.apply(value, weight, put, *kept)  # type: ignore[no-untyped-call, no-any-return]


class _Later(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, _: Parameter, put: Callable[..., None], *kept: Tensor) -> Tensor:
        ctx.put = put
        ctx.num_kept = len(kept)
        ctx.save_for_backward(*kept)
        # Not the value itself: a view must not be changed in place, as the loss changes logits.
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.put(*gradients, *ctx.saved_tensors)
        return (*gradients, None, None, *(ctx.num_kept * [None]))


class _Product:
    """A product of megatron-core's that may leave its weight's gradient to a second pass."""

    splitter: Splitter

    def _forward_impl(self, input: Tensor, weight: Parameter, *args: Any, **options: Any) -> Tensor:  # noqa: A002
        if not (self.splitter.on and weight.requires_grad):
            return super()._forward_impl(input, weight, *args, **options)  # type: ignore[misc, no-any-return]
        # Ranks of this group hold a part of the rows each.
        gathered = options["tp_group"] if options["sequence_parallel"] else None
        bias = options.pop("bias")
        for unused in ("grad_output_buffer", "wgrad_deferral_limit"):
            options.pop(unused, None)
        product = linear_with_frozen_weight(input, weight.detach(), None, **options)
        product = self.splitter.later(product, weight, partial(_part_of_product, weight, gathered), input.detach())
        return product if bias is None else product + bias


class ColumnProduct(_Product, ColumnParallelLinear):  # type: ignore[misc]
    """Tensor parallel ranks have columns of the output each."""


class RowProduct(_Product, RowParallelLinear):  # type: ignore[misc]
    """Tensor parallel ranks have rows of the weight's transpose each, and add up their outputs."""


def _part_of_product(weight: Parameter, gathered: dist.ProcessGroup | None, gradient: Tensor, rows: Tensor) -> Part:
    arrival = None
    if gathered is not None:
        # All ranks' rows, sent while the gradient of the input is computed.
        every = rows.new_empty(gathered.size() * len(rows), *rows.shape[1:])
        arrival = dist.all_gather_single(every, rows.contiguous(), group=gathered, async_op=True)
        rows = every
    return get_gradient_edge(weight), partial(_gradient_of_product, gradient, rows, arrival)


def _gradient_of_product(gradient: Tensor, rows: Tensor, arrival: dist.Work | None) -> Tensor:
    if arrival is not None:
        arrival.wait()
    columns, rows = prepare_input_tensors_for_wgrad_compute(gradient, rows)
    product: Tensor = columns.t().matmul(rows)
    return product


def _part_of_graph(edge: GradientEdge, gradient: Tensor) -> Part:
    return edge, partial(Tensor.detach, gradient)
