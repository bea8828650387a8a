"""Published rates of single kernels, and what the cost model makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from entrain_bench.config.compose import Composer
from entrain_bench.costs.roofline import Roofline, score_area
from entrain_bench.specs.cluster import ClusterSpec, DeviceSpec
from entrain_bench.specs.layer import Attention, Gemm
from entrain_bench.specs.parse import parse

TERA = 1e12


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product ``[m, k] @ [k, n]`` and its published rate."""

    m: int
    n: int
    k: int
    tflops: float

    def predicted_s(self, roofline: Roofline) -> float:
        """Its time on the roofline's device."""
        return float(roofline.gemm_s(Gemm(self.k, self.n), np.array([float(self.m)]), 1, 1)[0])

    @property
    def published_s(self) -> float:
        """Its published time."""
        return 2.0 * self.m * self.n * self.k / (self.tflops * TERA)


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """Attention over sequences of one length and the published rate of a pass, by the FLOPs that masks leave."""

    head_dim: int
    causal: bool
    backward: bool
    tokens: int
    tflops: float

    def predicted_s(self, roofline: Roofline) -> float:
        """Time of one head of one sequence on the roofline's device, as part of a large batch."""
        attention = Attention(self.head_dim * LARGE, self.head_dim * LARGE, self.causal, head_dim=self.head_dim)
        lengths = np.array([self.tokens])
        passes = roofline.attention_s(attention, score_area(attention, lengths), lengths.astype(np.float64), 1, 1)
        return float(passes[self.backward][0]) / LARGE

    @property
    def published_s(self) -> float:
        """Its published time; a backward has 2.5 times the FLOPs."""
        attention = Attention(self.head_dim, self.head_dim, self.causal)
        flops = float(attention.flops(np.array([self.tokens]))[0])
        return flops * (2.5 if self.backward else 1.0) / (self.tflops * TERA)


# Heads of a batch in which no kernel is bound by its launch.
LARGE = 1 << 20


@dataclass(frozen=True, slots=True)
class KernelAnchor:
    """A published kernel and the name of its device's YAML."""

    device: str
    kernel: Product | AttentionKernel


@dataclass(frozen=True, slots=True)
class KernelPoint:
    """A published kernel on a cluster's device."""

    cluster: ClusterSpec
    kernel: Product | AttentionKernel

    @classmethod
    def of(cls, anchor: KernelAnchor, composer: Composer) -> KernelPoint:
        """Return the kernel on the device that it was published for."""
        return cls(ClusterSpec.from_config(composer.run((f"cluster={anchor.device}x64",)).cluster), anchor.kernel)

    @property
    def device(self) -> DeviceSpec:
        """The configured device."""
        return self.cluster.device

    def ratio(self, device: DeviceSpec) -> float:
        """Predicted over published; kernels alone run at the full clock, so nothing of training is in it."""
        alone = replace(self.cluster, device=replace(device, sustained_fraction=1.0))
        return self.kernel.predicted_s(Roofline(alone)) / self.kernel.published_s


def parse_kernels(values: Mapping[str, Any], file: str) -> Iterator[KernelAnchor]:
    """Products from rows of m, n, k and TFLOP/s; attention from rows of rates, one for each of the lengths."""
    for group in values["products"]:
        device, where = group["device"], f"{file}: products of {group['device']}"
        for row in group["rows"]:
            product = dict(zip(("m", "n", "k", "tflops"), row, strict=True))
            yield KernelAnchor(device, parse(Product, product, where))
    for group in values["attention"]:
        device, where = group["device"], f"{file}: attention of {group['device']}"
        for row in group["rows"]:
            for tokens, tflops in zip(group["tokens"], row["tflops"], strict=True):
                yield KernelAnchor(device, parse(AttentionKernel, {**row, "tokens": tokens, "tflops": tflops}, where))
