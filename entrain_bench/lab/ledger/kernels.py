"""Published rates of single kernels (``experiments/ledger/kernels.csv``) and the constants fitted to them."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import median

import numpy as np

from entrain_bench.base.arrays import FloatArray
from entrain_bench.base.errors import UserError, unknown_choice
from entrain_bench.config.compose import Composer
from entrain_bench.config.tree import config_tree
from entrain_bench.costs.loads import score_area
from entrain_bench.costs.roofline import Roofline
from entrain_bench.lab.ledger.fit import Interval, Knob, Point, fit_points
from entrain_bench.specs.cluster import ClusterSpec
from entrain_bench.specs.layer import Attention, Gemm

TERA = 1e12
# Heads of a batch in which no kernel is bound by its launch.
LARGE = 1 << 20
PRODUCT, ATTENTION = KINDS = ("product", "attention")
# Standard deviation of the log of a kernel's time: of the published rates around the fitted ones.
ERROR = 0.1
# Constants of ``DeviceSpec`` that kernels alone decide: what is known of them before is nearly nothing.
KNOBS = {
    PRODUCT: (Knob("gemm_half_flops", 1.0),),
    ATTENTION: (Knob("attention_half_tokens", 1.0), Knob("attention_half_head_dim", 1.0)),
}


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


@dataclass(frozen=True, slots=True)
class KernelRow:
    """A published kernel on a device, by the name of its YAML, and where it is published."""

    device: str
    kernel: Product | AttentionKernel
    where: str

    @property
    def kind(self) -> str:
        """``product`` or ``attention``."""
        return PRODUCT if isinstance(self.kernel, Product) else ATTENTION


def read_kernels(path: Path | None = None) -> tuple[KernelRow, ...]:
    """All rows of a file (default: the committed one); ``UserError`` names file, line and field."""
    path = path or config_tree() / "ledger" / "kernels.csv"
    with path.open(newline="") as lines:
        return tuple(_row(f"{path.name}:{line}", values) for line, values in enumerate(csv.DictReader(lines), 2))


def _row(place: str, values: dict[str, str]) -> KernelRow:
    def number[Value: (int, float)](name: str, kind: Callable[[str], Value]) -> Value:
        try:
            value = kind(values[name])
        except ValueError:
            value = kind("0")
        if value <= 0:
            raise UserError(f"{place}: {name}={values[name]}: must be a positive number")
        return value

    rate = number("tflops", float)
    whole = partial(number, kind=int)
    if values["kernel"] not in KINDS:
        raise unknown_choice(f"{place}: kernel", values["kernel"], KINDS)
    if values["kernel"] == PRODUCT:
        kernel: Product | AttentionKernel = Product(whole("m"), whole("n"), whole("k"), rate)
    else:
        causal, backward = (values[name] == "true" for name in ("causal", "backward"))
        kernel = AttentionKernel(whole("head_dim"), causal, backward, whole("tokens"), rate)
    return KernelRow(values["device"], kernel, values["where"])


def kernel_ratio(row: KernelRow, cluster: ClusterSpec) -> float:
    """Predicted over published; kernels alone run at the full clock, so nothing of training is in it."""
    alone = replace(cluster, device=replace(cluster.device, sustained_fraction=1.0))
    return row.kernel.predicted_s(Roofline(alone)) / row.kernel.published_s


def products_of(composer: Composer) -> tuple[tuple[KernelRow, ClusterSpec], ...]:
    """Committed products with a cluster of their device."""
    rows = [row for row in read_kernels() if row.kind == PRODUCT]
    clusters = {device: cluster_with(device, composer) for device in sorted({row.device for row in rows})}
    return tuple((row, clusters[row.device]) for row in rows)


def cluster_with(device: str, composer: Composer) -> ClusterSpec:
    """A cluster of a device, by the name of its YAML."""
    return ClusterSpec.from_config(composer.run((f"cluster={device}x64",)).cluster)


def kernel_point(row: KernelRow, cluster: ClusterSpec) -> Point:
    """A kernel as a point of a fit of its kind's ``KNOBS``."""
    names = [knob.name for knob in KNOBS[row.kind]]

    def predict(factors: FloatArray) -> Interval:
        values = [getattr(cluster.device, name) * factor for name, factor in zip(names, factors.tolist(), strict=True)]
        changed = replace(cluster.device, **dict(zip(names, values, strict=True)))
        seconds = kernel_ratio(row, replace(cluster, device=changed)) * row.kernel.published_s
        return seconds, seconds

    return Point(row.where, row.device, (row.kernel.published_s, row.kernel.published_s), predict, ERROR)


def kernels_table(composer: Composer) -> tuple[str, list[str], list[list[str]]]:
    """Title, heading and rows: constants fitted to each device's kernels, and errors of the committed constants."""
    rows = []
    for (device, kind), each in groupby(read_kernels(), key=lambda row: (row.device, row.kind)):
        listed = [*each]
        cluster = cluster_with(device, composer)
        found = fit_points([kernel_point(row, cluster) for row in listed], KNOBS[kind], iterations=4)
        factors = zip(KNOBS[kind], found.factors(device).tolist(), strict=True)
        fitted = [f"{knob.name} {getattr(cluster.device, knob.name) * factor:.2g}" for knob, factor in factors]
        errors = [abs(kernel_ratio(row, cluster) - 1.0) for row in listed]
        shown = [f"{100 * median(errors):.0f}%", f"{100 * max(errors):.0f}%", ", ".join(fitted)]
        rows.append([f"{device}, {kind}", str(len(errors)), *shown])
    return "Kernels", ["kernels", "number", "median error", "largest error", "fitted"], rows
