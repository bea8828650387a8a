"""Consecutive products of an encoder's input embedding or projector, with rows folded together between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import gelu, pad

from entrain_bench.base.errors import IncompatibleError
from entrain_bench.specs.layer import Gemm
from entrain_bench.train.device import to_device
from entrain_bench.train.modules.packing import StageGroups
from entrain_bench.train.modules.split import ColumnProduct, RowProduct


@dataclass(frozen=True, slots=True)
class Fold:
    """How rows of ``channels`` become the rows of the next product.

    ``stride`` rows make one: ``width`` rows next to each other (as many: merged; more: a convolution that reaches back
    to the rows before; one of several: their mean).

    Attributes:
        width: rows that the product's input is made of.
        stride: rows after which the next input begins.
        rows_per_token: rows of a token before folding.
    """

    width: int
    stride: int
    rows_per_token: int

    @property
    def halo_tokens(self) -> int:
        """Tokens before a token that its folded rows reach back to."""
        return -(-max(0, self.width - self.stride) // self.rows_per_token)

    def apply(self, rows: Tensor, positions: Tensor | None) -> Tensor:
        """Fold ``[rows, channels]`` to ``[rows / stride, width * channels]``.

        Args:
            rows: rows of consecutive tokens.
            positions: place of each token in its sequence, on the CPU, needed where folding reaches back: rows before
                a sequence's first count as zeros.
        """
        if self.width == self.stride:
            return rows.reshape(-1, self.width * rows.shape[1])
        if self.width == 1:
            return rows.reshape(-1, self.stride, rows.shape[1]).mean(dim=1)
        assert positions is not None
        reach = self.width - self.stride
        at = torch.arange(0, len(rows), self.stride)
        place = positions[at // self.rows_per_token] * self.rows_per_token + at % self.rows_per_token
        inside = to_device(place[:, None] + torch.arange(self.width) >= reach, rows.device)
        taken = pad(rows, (0, 0, reach, 0)).unfold(0, self.width, self.stride).transpose(1, 2)
        return torch.where(inside.unsqueeze(-1), taken, 0.0).reshape(len(at), -1)


def fold_between(channels: int, rows_per_token: float, gemm: Gemm, where: str) -> Fold:
    """The fold that leads from rows of ``channels`` to the rows of a product.

    Raises:
        IncompatibleError: if there is none.
    """
    stride, width = rows_per_token / gemm.rows_per_token, gemm.k / channels
    whole = stride == int(stride) and width == int(width)
    if not whole or stride < 1 or (1 < width < stride):
        raise IncompatibleError(
            f"{where}: k={gemm.k}, rows_per_token={gemm.rows_per_token} do not follow from rows of {channels} "
            f"channels, {rows_per_token} a token"
        )
    return Fold(int(width), int(stride), max(1, int(rows_per_token)))


class Products(torch.nn.Module):
    """Products with GELU between them, column and row parallel as their specification says.

    ``folds`` are how rows become the input of each product.
    """

    def __init__(
        self,
        gemms: Sequence[Gemm],
        folds: Sequence[Fold],
        config: TransformerConfig,
        groups: StageGroups,
        *,
        bias: bool,
        activate_last: bool,
    ) -> None:
        super().__init__()
        self.folds = tuple(folds)
        self.num_active = len(gemms) if activate_last else len(gemms) - 1
        self.products = torch.nn.ModuleList()
        for index, (gemm, fold) in enumerate(zip(gemms, folds, strict=True)):
            product: torch.nn.Module
            if gemm.row_parallel:
                product = RowProduct(
                    gemm.k,
                    gemm.n,
                    config=config,
                    init_method=config.init_method,
                    bias=bias,
                    input_is_parallel=index > 0 and not gemms[index - 1].row_parallel,
                    skip_bias_add=False,
                    # Folded rows are (row, channel) and ranks hold channels: shares of k interleave, a piece a row.
                    stride=fold.width,
                    tp_group=groups.tp,
                )
            else:
                product = ColumnProduct(
                    gemm.k,
                    gemm.n,
                    config=config,
                    init_method=config.init_method,
                    bias=bias,
                    gather_output=not (index + 1 < len(gemms) and gemms[index + 1].row_parallel),
                    tp_group=groups.tp,
                )
            self.products.append(product)

    def forward(self, rows: Tensor, positions: Tensor | None = None) -> Tensor:
        """``[tokens * rows_per_token, channels]`` to ``[tokens * rows_per_token of the last product, n]``."""
        for index, (fold, product) in enumerate(zip(self.folds, self.products, strict=True)):
            rows, _ = product(fold.apply(rows, positions))
            if index < self.num_active:
                rows = gelu(rows)
        return rows
