"""Attention of packed sequences by one of several kernels; keys and values gathered over context parallel ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from entrain_bench.train.modules.packing import Segments
from entrain_bench.train.modules.positions import Rotation


class AttentionKernel(StrEnum):
    """Kernel of attention.

    ``FLASH2``, ``FLASH3`` and ``FLASH4`` are torch's variable-length attention, all sequences in one call: its own
    kernel, or that of an installed package. ``CPU`` is torch's flash attention for CPUs, ``SDPA`` its scaled
    dot-product attention: one call for all sequences of a length.
    """

    CPU = "cpu"
    SDPA = "sdpa"
    FLASH2 = "flash2"
    FLASH3 = "flash3"
    FLASH4 = "flash4"


@dataclass(frozen=True, slots=True)
class Mask:
    """Takes the place of a mask in a layer's attention."""

    segments: Segments
    rotation: Rotation | None = None


class PackedAttention(torch.nn.Module):
    """Core attention of a megatron-core layer; takes a ``Mask`` for its attention mask."""

    def __init__(
        self,
        *,
        attn_mask_type: AttnMaskType,
        pg_collection: ProcessGroupCollection,
        kernel: AttentionKernel,
        **_: Any,
    ) -> None:
        super().__init__()
        self.kernel = kernel
        self.causal = attn_mask_type == AttnMaskType.causal
        self.cp = pg_collection.cp

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, **_: Any) -> Tensor:
        """Attend from ``[tokens of this rank, 1, heads, head_dim]`` to ``[tokens of this rank, 1, heads * head_dim]``.

        Keys and values have key-value heads.
        """
        segments = mask.segments
        if mask.rotation is not None:
            query, key = mask.rotation.apply(query), mask.rotation.apply(key)
        if self.cp.size() > 1:
            both = torch.cat([key, value], dim=-1)
            both = gather_from_sequence_parallel_region(both, tensor_parallel_output_grad=True, group=self.cp)
            key, value = both.narrow(0, segments.first_key, sum(segments.key_lengths)).chunk(2, dim=-1)
        # Copies of their own: views would keep the product that queries, keys and values are cut out of.
        query, key, value = (tensor.squeeze(1).contiguous() for tensor in (query, key, value))
        output = packed_attention(query, key, value, segments, causal=self.causal, kernel=self.kernel)
        return output.reshape(len(query), 1, -1)


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, causal: bool, kernel: AttentionKernel
) -> Tensor:
    """Scaled dot-product attention inside each segment.

    ``query [sum(query_lengths), heads, head_dim]``; ``key`` and ``value [sum(key_lengths), key-value heads,
    head_dim]``. If ``causal``, a segment's queries, which are its last tokens, see only keys up to themselves. The
    result has the shape of ``query``.
    """
    output: Any
    if kernel is AttentionKernel.CPU:
        output = _FlashOnCpu.apply(query, key, value, segments, causal)  # type: ignore[no-untyped-call]
    elif kernel is AttentionKernel.SDPA:
        output = _by_length(query, key, value, segments, causal)
    else:
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


def _by_length(query: Tensor, key: Tensor, value: Tensor, segments: Segments, causal: bool) -> Tensor:
    # Not every backend of the operator takes fewer keys and values than queries.
    key, value = (rows.repeat_interleave(query.shape[1] // rows.shape[1], dim=1) for rows in (key, value))
    found: dict[int, Tensor] = {}
    for alike, (q, k, v) in _batches((query, key, value), segments):
        attended = scaled_dot_product_attention(q, k, v, **_causality(q, k, causal))
        found |= dict(zip(alike, attended.transpose(1, 2), strict=True))
    return torch.cat([found[index] for index in range(len(found))])


class _FlashOnCpu(torch.autograd.Function):
    """torch's flash attention for CPUs, by segment length; keeps what a variable-length kernel keeps."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: Segments, causal: bool) -> Tensor:
        output, sums = torch.empty_like(query), []
        into = torch.split(output, list(segments.query_lengths))
        for alike, (q, k, v) in _batches((query, key, value), segments):
            attended, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, **_causality(q, k, causal)
            )
            sums.append(log_sum)
            for i, rows in zip(alike, attended.transpose(1, 2), strict=True):
                into[i].copy_(rows)
        ctx.save_for_backward(query, key, value, output, *sums)
        ctx.segments, ctx.causal = segments, causal
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, *sums = ctx.saved_tensors
        segments: Segments = ctx.segments
        found = [torch.empty_like(rows) for rows in (query, key, value)]
        lengths = (segments.query_lengths, segments.key_lengths, segments.key_lengths)
        into = [torch.split(rows, list(each)) for rows, each in zip(found, lengths, strict=True)]
        batches = _batches((query, key, value, output, gradients[0]), segments)
        for (alike, (q, k, v, attended, gradient)), log_sum in zip(batches, sums, strict=True):
            by_input = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient, q, k, v, attended, log_sum, 0.0, **_causality(q, k, ctx.causal)
            )
            for rows, values in zip(into, by_input, strict=True):
                for i, own in zip(alike, values.transpose(1, 2), strict=True):
                    rows[i].copy_(own)
        return *found, None, None


def _batches(tensors: tuple[Tensor, ...], segments: Segments) -> Iterator[tuple[list[int], list[Tensor]]]:
    """Segments of equal lengths, with their rows of each tensor ``[segments, heads, rows, head_dim]``.

    The second and third tensors are keys and values, the others have the rows of queries.
    """
    queries, keys = segments.query_lengths, segments.key_lengths
    members = defaultdict(list)
    for index, lengths in enumerate(zip(queries, keys, strict=True)):
        members[lengths].append(index)
    sizes = (queries, keys, keys, queries, queries)
    parts = [torch.split(rows, list(each)) for rows, each in zip(tensors, sizes, strict=False)]
    for alike in members.values():
        yield alike, [torch.stack([rows[i] for i in alike]).transpose(1, 2) for rows in parts]


def _causality(query: Tensor, key: Tensor, causal: bool) -> dict[str, Any]:
    """Arguments of masking; the kernel masks itself if a segment has as many queries as keys."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    if not causal or num_queries == num_keys:
        return {"is_causal": causal}
    hidden = query.new_full((num_queries, num_keys), -torch.inf).triu(1 + num_keys - num_queries)
    return {"is_causal": False, "attn_mask": hidden}
