"""Consecutive products of an encoder's input embedding or projector, with rows folded together between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

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
    """How rows become the input rows of the next product, each of ``width`` rows, ``stride`` rows after the last.

    As wide as the stride: merged; wider: a convolution that reaches back; of width one: the mean of the stride.
    ``rows_per_token`` counts rows before folding.
    """

    width: int
    stride: int
    rows_per_token: int

    @property
    def halo_tokens(self) -> int:
        """Tokens before a token that its folded rows reach back to."""
        return -(-max(0, self.width - self.stride) // self.rows_per_token)

    def apply(self, rows: Tensor, positions: Tensor | None) -> Tensor:
        """Fold rows of consecutive tokens ``[rows, channels]`` to ``[rows / stride, width * channels]``.

        ``positions`` are the place of each token in its sequence, on the CPU: a convolution takes zeros for rows before
        a sequence's first.
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


def _fold_between(channels: int, rows_per_token: float, gemm: Gemm, where: str) -> Fold:
    """The fold from rows of ``channels`` to the rows of a product; ``IncompatibleError`` if there is none."""
    stride, width = rows_per_token / gemm.rows_per_token, gemm.k / channels
    whole = stride == int(stride) and width == int(width)
    if not whole or stride < 1 or (1 < width < stride):
        raise IncompatibleError(
            f"{where}: k={gemm.k}, rows_per_token={gemm.rows_per_token} do not follow from rows of {channels} "
            f"channels, {rows_per_token} a token"
        )
    return Fold(int(width), int(stride), max(1, int(rows_per_token)))


class Products(torch.nn.Module):
    """Products with GELU between them, column and row parallel as specified; a fold before each.

    The first takes rows of ``channels``, ``rows_per_token`` of them a token; ``IncompatibleError`` names the product
    (``where``) whose rows do not follow from those before it.
    """

    def __init__(
        self,
        gemms: Sequence[Gemm],
        channels: int,
        rows_per_token: float,
        config: TransformerConfig,
        groups: StageGroups,
        *,
        where: str,
        bias: bool,
        activate_last: bool,
    ) -> None:
        super().__init__()
        self.folds: list[Fold] = []
        self.num_active = len(gemms) if activate_last else len(gemms) - 1
        self.products = torch.nn.ModuleList()
        for index, gemm in enumerate(gemms):
            fold = _fold_between(channels, rows_per_token, gemm, f"{where}[{index}]")
            channels, rows_per_token = gemm.n, gemm.rows_per_token
            make: Callable[..., torch.nn.Module]
            if gemm.row_parallel:
                split_before = index > 0 and not gemms[index - 1].row_parallel
                # Folded rows are (row, channel) and ranks hold channels: shares of k interleave, a piece a row.
                make = partial(RowProduct, input_is_parallel=split_before, skip_bias_add=False, stride=fold.width)
            else:
                split_after = index + 1 < len(gemms) and gemms[index + 1].row_parallel
                make = partial(ColumnProduct, gather_output=not split_after)
            self.folds.append(fold)
            sizes, init = (gemm.k, gemm.n), config.init_method
            self.products.append(make(*sizes, config=config, init_method=init, bias=bias, tp_group=groups.tp))

    def forward(self, rows: Tensor, positions: Tensor | None = None) -> Tensor:
        """``[tokens * rows_per_token, channels]`` to ``[tokens * rows_per_token of the last product, n]``."""
        for index, (fold, product) in enumerate(zip(self.folds, self.products, strict=True)):
            rows, _ = product(fold.apply(rows, positions))
            if index < self.num_active:
                rows = gelu(rows)
        return rows
