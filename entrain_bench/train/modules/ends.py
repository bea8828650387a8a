"""First and last layers: input embeddings, an encoder's projector, the LLM's head with its loss."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core.tensor_parallel import (
    VocabParallelEmbedding,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    vocab_parallel_cross_entropy,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import gelu, pad

from entrain_bench.base.errors import IncompatibleError
from entrain_bench.specs.layer import Gemm
from entrain_bench.specs.model import ModuleSpec
from entrain_bench.train.device import to_device
from entrain_bench.train.modules.blocks import Norm
from entrain_bench.train.modules.packing import (
    Arrangement,
    Pack,
    Shares,
    StageGroups,
    merge_tokens,
    on_grid,
    places_in,
    share_of,
)
from entrain_bench.train.modules.split import ColumnProduct, RowProduct, Splitter


def input_width(module: ModuleSpec) -> int:
    """Features of one encoder token: all rows that its first embedding product takes."""
    first = module.layers[0].gemms[0]
    width = first.k * first.rows_per_token
    if width != int(width):
        raise IncompatibleError(
            f"model.modules.{module.name}.embed_gemms[0]: k x rows_per_token={width}: must be whole"
        )
    return int(width)


def whole_tokens(config: TransformerConfig) -> TransformerConfig:
    """The configuration of products whose input is the same on all tensor parallel ranks."""
    same = copy.copy(config)
    same.sequence_parallel = False
    return same


@dataclass(frozen=True, slots=True)
class Fold:
    """Fold of rows to the next product's inputs: ``width`` rows each, ``stride`` rows apart.

    ``width == stride`` merges, a larger width is a convolution that reaches back, width one takes the mean of a stride.
    """

    width: int
    stride: int
    rows_per_token: int

    @property
    def overlaps(self) -> bool:
        """Whether folded rows reach back to tokens before their own."""
        return self.width > self.stride

    def apply(self, rows: Tensor, positions: Tensor | None) -> Tensor:
        """Fold rows of consecutive tokens ``[rows, channels]`` to ``[rows / stride, width * channels]``.

        ``positions`` of tokens in their sequences are on the CPU; rows before a sequence's first are zeros.
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
    stride = rows_per_token / gemm.rows_per_token
    width = gemm.k / channels
    whole = stride == int(stride) and width == int(width)
    if not whole or stride < 1 or (1 < width < stride):
        raise IncompatibleError(
            f"{where}: k={gemm.k} rows_per_token={gemm.rows_per_token}: cannot follow a product with {channels} "
            f"channels and {rows_per_token} rows per token"
        )
    return Fold(int(width), int(stride), max(1, int(rows_per_token)))


class Products(torch.nn.Module):
    """Products with GELU between them and a fold before each; ``IncompatibleError`` names one that does not follow."""

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
            channels = gemm.n
            rows_per_token = gemm.rows_per_token
            make: Callable[..., torch.nn.Module]
            if gemm.row_parallel:
                split_before = index > 0 and not gemms[index - 1].row_parallel
                # Folded rows are (row, channel) and ranks hold channels: shares of k interleave, one piece per row.
                make = partial(RowProduct, input_is_parallel=split_before, skip_bias_add=False, stride=fold.width)
            else:
                split_after = index + 1 < len(gemms) and gemms[index + 1].row_parallel
                make = partial(ColumnProduct, gather_output=not split_after)
            self.folds.append(fold)
            sizes = (gemm.k, gemm.n)
            init = config.init_method
            self.products.append(make(*sizes, config=config, init_method=init, bias=bias, tp_group=groups.tp))

    def forward(self, rows: Tensor, positions: Tensor | None = None) -> Tensor:
        """``[tokens * rows_per_token, channels]`` to ``[tokens * rows_per_token of the last product, n]``."""
        for index, (fold, product) in enumerate(zip(self.folds, self.products, strict=True)):
            rows, _ = product(fold.apply(rows, positions))
            if index < self.num_active:
                rows = gelu(rows)
        return rows


def _all_tokens(hidden: Tensor, groups: StageGroups) -> Tensor:
    """Gather the tokens of tensor parallel ranks, which all use them equally: each has the whole gradient."""
    if not groups.splits_tokens:
        return hidden
    gathered: Tensor = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=groups.tp)
    return gathered


class EncoderEmbedding(torch.nn.Module):
    """Features of all tokens to hidden states of this rank's tokens; convolutions that overlap take all tokens."""

    def __init__(self, module: ModuleSpec, config: TransformerConfig, groups: StageGroups) -> None:
        super().__init__()
        gemms = module.layers[0].gemms
        where = f"model.modules.{module.name}.embed_gemms"
        self.channels = gemms[0].k
        # Convolutions over frames have biases and GELU; one product embeds patches, with a bias if norms have one.
        bias = module.config.norm_bias
        self.products = Products(
            gemms,
            gemms[0].k,
            gemms[0].rows_per_token,
            whole_tokens(config),
            groups,
            where=where,
            bias=bias,
            activate_last=bias and not on_grid(module),
        )
        if gemms[-1].rows_per_token != 1 or gemms[-1].n != config.hidden_size:
            needed = f"one row of hidden_size={config.hidden_size} per token"
            raise IncompatibleError(f"{where}: the last product must return {needed}")
        self.overlaps = any(fold.overlaps for fold in self.products.folds)
        if module.config.window_tokens and self.overlaps:
            raise IncompatibleError(f"{where}: window_tokens needs patches that do not overlap")
        count = module.config.learned_positions
        self.positions = Parameter(torch.empty(count, config.hidden_size)) if count else None
        self.module = module.name
        self.groups = groups
        self.dtype = config.params_dtype

    def forward(self, features: Tensor, pack: Pack, shares: Shares) -> Tensor:
        """``[sum(lengths), input_width]`` to ``[tokens of this rank, hidden_size]``."""
        share = shares.products
        positions = places_in(torch.tensor(pack.lengths))[1]
        if not self.overlaps:
            features = share.pad(features)
            positions = share.pad(positions)
        rows = features.to(self.dtype).reshape(-1, self.channels)
        hidden: Tensor = self.products(rows, positions)
        if self.positions is not None:
            most = len(self.positions)
            given = int(positions.max()) + 1
            if given > most:
                raise IncompatibleError(
                    f"model.modules.{self.module}.learned_positions={most}: an item of the workload has {given} tokens"
                )
            hidden = hidden + self.positions[to_device(positions, self.positions.device)]
        if self.overlaps:
            hidden = share.pad(hidden)
        if not self.groups.splits_tokens:
            return hidden
        # A copy: a view would keep all tokens.
        part: Tensor = scatter_to_sequence_parallel_region(hidden, group=self.groups.tp).clone()
        return part


class Projector(torch.nn.Module):
    """Hidden states to the LLM tokens of all items, the same on all ranks.

    Each item takes ``outputs * merge`` of its tokens: missing ones are zeros, surplus ones are dropped.
    """

    def __init__(self, module: ModuleSpec, config: TransformerConfig, groups: StageGroups) -> None:
        super().__init__()
        gemms = module.layers[-1].gemms
        where = f"model.modules.{module.name}.head_gemms"
        self.merge = merge_tokens(module)
        self.norm = Norm(config, config.hidden_size) if module.config.head_norm else torch.nn.Identity()
        rows = (config.hidden_size, 1.0)
        products = whole_tokens(config)
        self.products = Products(gemms, *rows, products, groups, where=where, bias=True, activate_last=False)
        if overlapping := [index for index, fold in enumerate(self.products.folds) if fold.overlaps]:
            raise IncompatibleError(f"{where}[{overlapping[0]}]: a projector's product must not overlap tokens")
        self.groups = groups

    def forward(self, hidden: Tensor, pack: Pack, shares: Shares, arrangement: Arrangement | None) -> Tensor:
        """``[tokens of this rank, hidden_size]`` to ``[sum(outputs), LLM hidden size]``, in the order of the pack."""
        hidden = _all_tokens(self.norm(hidden), self.groups)
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=shares.cp)
        share = share_of(sum(pack.outputs), shares.cp)
        taken = share.pad(self._taken_tokens(pack), -1).flatten()
        if arrangement and arrangement.windows:
            taken = torch.where(taken >= 0, arrangement.place[taken.clamp(min=0)], -1)
        taken = torch.where(taken >= 0, shares.products.places[taken.clamp(min=0)], -1)
        token = to_device(taken, hidden.device)
        rows = torch.where((token >= 0)[:, None], hidden.index_select(0, token.clamp(min=0)), 0.0)
        rows = self.products(rows)
        outputs: Tensor = gather_from_sequence_parallel_region(rows, tensor_parallel_output_grad=False, group=shares.cp)
        return outputs[: sum(pack.outputs)]

    def _taken_tokens(self, pack: Pack) -> Tensor:
        """Token behind every row of every output ``[sum(outputs), merge]``, -1 for none, on the CPU."""
        lengths = torch.tensor(pack.lengths)
        outputs = torch.tensor(pack.outputs)
        item, first = places_in(outputs)
        inside = first[:, None] * self.merge + torch.arange(self.merge)
        starts = (lengths.cumsum(0) - lengths)[item]
        return torch.where(inside < lengths[item][:, None], starts[:, None] + inside, -1)


class TokenEmbedding(torch.nn.Module):
    """Embeddings of text, with projected tokens put in their places."""

    splitter: Splitter

    def __init__(self, module: ModuleSpec, config: TransformerConfig, groups: StageGroups) -> None:
        super().__init__()
        self.groups = groups
        self.words = VocabParallelEmbedding(
            module.config.vocab_size,
            config.hidden_size,
            init_method=config.init_method,
            reduce_scatter_embeddings=groups.splits_tokens,
            config=config,
            tp_group=groups.tp,
        )

    def forward(self, projected: Tensor | None, pack: Pack, shares: Shares) -> Tensor:
        """``[projected tokens, hidden_size]`` and ``token_ids`` to ``[tokens of this rank, hidden_size]``."""
        assert pack.token_ids is not None
        device = self.words.weight.device
        share = shares.hidden
        ids = self.groups.renumbered(shares.products.pad(pack.token_ids).clamp(min=0), self.words.num_embeddings)
        ids = to_device(ids, device)
        # The scatter wants the tokens of one sample; it hands them on in its own order of dimensions.
        hidden: Tensor = self.words(ids[None]).squeeze(1) if self.groups.splits_tokens else self.words(ids)
        if self.splitter.on and self.words.weight.requires_grad:
            hidden = self.splitter.cut(hidden, self.words.weight)
        if projected is None:
            return hidden
        # Every rank uses the projected tokens among its own; their gradients are summed over the ranks.
        projected = copy_to_tensor_model_parallel_region(projected, group=shares.cp)
        if self.groups.splits_tokens:
            projected = copy_to_tensor_model_parallel_region(projected, group=self.groups.tp)
        places = (share.pad(pack.token_ids) < 0).nonzero().flatten()
        number = share.pad((pack.token_ids < 0).cumsum(0) - 1)[places]
        here = projected.index_select(0, to_device(number, projected.device)).to(hidden.dtype)
        return hidden.index_copy(0, to_device(places, device), here)


class LanguageHead(torch.nn.Module):
    """Final norm, logits, and cross entropy of labeled positions."""

    def __init__(self, module: ModuleSpec, config: TransformerConfig, groups: StageGroups, *, own_weight: bool) -> None:
        super().__init__()
        self.groups = groups
        self.norm = Norm(config, config.hidden_size)
        self.logits = ColumnProduct(
            config.hidden_size,
            module.config.vocab_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            skip_weight_param_allocation=not own_weight,
            tp_group=groups.tp,
        )

    def forward(self, hidden: Tensor, pack: Pack, shares: Shares, weight: Parameter | None) -> Tensor:
        """Summed cross entropy, a float32 scalar, of ``[tokens of this rank, hidden_size]``; ``weight`` if tied."""
        assert pack.labels is not None
        labels = shares.products.pad(pack.labels, -1)
        hidden = self.norm(hidden)
        labels = to_device(labels, hidden.device)
        logits, _ = self.logits(hidden, weight=weight)
        logits = logits.float()  # frees those in bfloat16 before the loss
        ids = self.groups.renumbered(labels.clamp(min=0), self.logits.output_size)
        losses = vocab_parallel_cross_entropy(logits, ids, tp_group=self.groups.tp)
        return torch.where(labels >= 0, losses, 0.0).sum()
