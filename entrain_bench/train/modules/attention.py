"""Attention of packed sequences, with keys and values gathered over context parallel ranks."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from entrain_bench.train.modules.packing import Segments

FLASH_HEAD_DIMS = range(8, 257, 8)  # messages of torch 2.13's kernel (libtorch_cuda), read 2026-11


class PackedAttention(torch.nn.Module):
    """Core attention of a megatron-core layer; takes ``Segments`` for its attention mask."""

    def __init__(self, *, attn_mask_type: AttnMaskType, pg_collection: ProcessGroupCollection, **_: Any) -> None:
        super().__init__()
        self.causal = attn_mask_type == AttnMaskType.causal
        self.cp = pg_collection.cp

    def forward(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, **_: Any) -> Tensor:
        """Attend.

        Args:
            query: ``[tokens of this rank, 1, heads, head_dim]``.
            key: ``[tokens of this rank, 1, key-value heads, head_dim]``.
            value: as key.
            segments: who attends to whom.

        Returns:
            ``[tokens of this rank, 1, heads * head_dim]``.
        """
        if self.cp.size() > 1:
            both = torch.cat([key, value], dim=-1)
            both = gather_from_sequence_parallel_region(both, tensor_parallel_output_grad=True, group=self.cp)
            key, value = both.narrow(0, segments.first_key, sum(segments.key_lengths)).chunk(2, dim=-1)
        output = packed_attention(query.squeeze(1), key.squeeze(1), value.squeeze(1), segments, causal=self.causal)
        return output.reshape(len(query), 1, -1)


def packed_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, causal: bool) -> Tensor:
    """Scaled dot-product attention inside each segment.

    One kernel where ``uses_flash`` says so, otherwise one batched call per distinct segment length.

    Args:
        query: ``[sum(query_lengths), heads, head_dim]``.
        key: ``[sum(key_lengths), key-value heads, head_dim]``.
        value: as key.
        segments: rows of each segment.
        causal: whether a segment's queries, which are its last tokens, see only keys up to themselves.

    Returns:
        As query.
    """
    if uses_flash(query.dtype, query.device):
        return _flash(query, key, value, segments, causal)
    members = defaultdict(list)
    for index, lengths in enumerate(zip(segments.query_lengths, segments.key_lengths, strict=True)):
        members[lengths].append(index)
    queries = torch.split(query, list(segments.query_lengths))
    keys, values = (torch.split(rows, list(segments.key_lengths)) for rows in (key, value))
    outputs: list[Tensor] = [query] * len(queries)
    for (num_queries, num_keys), alike in members.items():
        q, k, v = (torch.stack([rows[i] for i in alike]).transpose(1, 2) for rows in (queries, keys, values))
        mask = None
        if causal and num_queries < num_keys:
            mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
            mask = mask.tril(num_keys - num_queries)
        attended = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal and mask is None, enable_gqa=query.shape[1] != key.shape[1]
        )
        for i, rows in zip(alike, attended.transpose(1, 2), strict=True):
            outputs[i] = rows
    return torch.cat(outputs)


def uses_flash(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether attention takes the variable-length flash attention kernel: bfloat16 on a GPU."""
    return dtype is torch.bfloat16 and device.type != "cpu"


def _flash(query: Tensor, key: Tensor, value: Tensor, segments: Segments, causal: bool) -> Tensor:
    output = varlen_attn(
        query,
        key,
        value,
        segments.query_offsets,
        segments.key_offsets,
        max(segments.query_lengths),
        max(segments.key_lengths),
        window_size=(-1, 0) if causal else (-1, -1),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output, Tensor)
    return output
