"""Settings of published runs that jobs of the suite do not have."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from entrain_bench.specs.framework import FrameworkOptions
from entrain_bench.specs.layer import FP32_BYTES
from entrain_bench.specs.model import ModuleSpec


@dataclass(frozen=True)
class LedgerOptions(FrameworkOptions):
    """How the trainer of a published run ran it.

    Attributes:
        optimizer_ranks: ranks that share out the optimizer states of a weight; 0: all that hold it.
        fp32_all_reduce: whether gradients are all-reduced in fp32, whatever their type and the optimizer.
    """

    optimizer_ranks: int = 0
    fp32_all_reduce: bool = False

    def scattered_bytes(self, element_bytes: int) -> int:
        """Bytes that the reduction of a gradient moves, as those of a reduce-scatter; an all-reduce has two."""
        return 2 * FP32_BYTES if self.fp32_all_reduce else self.gradient_bytes(element_bytes)

    def optimizer_instances(self, module: ModuleSpec, copies: int) -> int:  # noqa: ARG002 - of every module
        """Copies of the sharded optimizer states among ``copies`` ranks that hold the same weights."""
        return copies // gcd(self.optimizer_ranks, copies) if self.optimizer_ranks else 1
