"""Settings of published runs that jobs of the suite do not have."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.specs.layer import BF16_BYTES, FP32_BYTES
from entrain_bench.specs.model import ModuleSpec

# Bytes of a gradient that Apex moves besides, see ``LedgerOptions.apex``.
APEX_BYTES = 6 * BF16_BYTES + 4 * FP32_BYTES


@dataclass(frozen=True)
class LedgerOptions(FrameworkOptions):
    """How the trainer of a published run ran it.

    Attributes:
        optimizer_ranks: ranks that share out the optimizer states of a weight; 0: all that hold it.
        fp32_all_reduce: whether gradients are all-reduced in fp32, whatever their type and the optimizer.
        fused_accumulation: whether products for weights add to the sum of gradients themselves; otherwise a kernel adds
            the gradients of every microbatch but the first.
        fused_qkv: whether one product makes queries, keys and values.
        fused_gates: whether one product makes both inputs of a gated activation.
        async_products: whether tensor-parallel products are megatron-core's, which overlap communication in backward;
            otherwise PyTorch's, which keep gathered inputs and all-reduce the input gradient of each product.
        eager_blocks: whether blocks are of PyTorch's operators: copies put heads first, in both passes, and kernels of
            their own add the bias of an MLP's first product and add up the gradients of biases.
        half_shards: whether sharded weights and their gradients are in 16 bits, so that the optimizer step casts the
            latter, too.
        apex: whether Apex trains: it copies gradients into buckets, divides them and copies them back (6 values in 16
            bits). In fp32 it takes their norm (1 value), scales them to it (2), and a kernel of its own casts weights
            (a value more than Adam's own, which writes the result only).
    """

    optimizer_ranks: int = 0
    fp32_all_reduce: bool = False
    fused_accumulation: bool = True
    fused_qkv: bool = True
    fused_gates: bool = True
    async_products: bool = True
    eager_blocks: bool = False
    half_shards: bool = False
    apex: bool = False

    @property
    def overlaps_products(self) -> bool:
        """As ``async_products`` says."""
        return self.async_products

    @property
    def accumulation_bytes(self) -> int:
        """Bytes of a parameter that a microbatch moves to add its gradient to those before, outside of products."""
        return 0 if self.fused_accumulation else BF16_BYTES + 2 * self.gradient_bytes(BF16_BYTES)

    @property
    def cast_bytes(self) -> int:
        """With the other passes over gradients of ``apex``."""
        return super().cast_bytes + APEX_BYTES * self.apex

    def copies_gradients(self, sharded: bool) -> bool:
        """As ``half_shards`` says."""
        return self.half_shards or not sharded

    def scattered_bytes(self, element_bytes: int) -> int:
        """Bytes that the reduction of a gradient moves, as those of a reduce-scatter; an all-reduce has two."""
        return 2 * FP32_BYTES if self.fp32_all_reduce else self.gradient_bytes(element_bytes)

    def optimizer_instances(self, module: ModuleSpec, copies: int) -> int:  # noqa: ARG002 - of every module
        """Copies of the sharded optimizer states among ``copies`` ranks that hold the same weights."""
        return copies // gcd(self.optimizer_ranks, copies) if self.optimizer_ranks else 1
