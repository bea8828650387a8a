"""Published rates of single kernels, and ranges of forwards, that constants are fitted to or compared with.

``experiments/ledger`` holds them: ``kernels.csv``, to which constants of size are fitted; ``matmul_tflops.csv``, which
is compared alone; and ``forwards.csv``, the axes of two figures on the A40.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from entrain_bench.config.compose import Composer
from entrain_bench.config.tree import config_tree
from entrain_bench.costs.loads import score_area
from entrain_bench.costs.roofline import Roofline
from entrain_bench.costs.truth import CostTruth
from entrain_bench.lab.fidelity.programs import first_program
from entrain_bench.lab.ledger.predict import Table
from entrain_bench.program import Program
from entrain_bench.specs.cluster import ClusterSpec
from entrain_bench.specs.layer import Attention, Gemm

TERA = 1e12
# Heads of a batch in which no kernel is bound by its launch.
LARGE = 1 << 20
HALF_PRECISION = ("bf16", "fp16")
# Matrix products ``[m, k] @ [k, n]``, and attention over sequences of one length.
PRODUCT = "product"
ATTENTION = "attention"
SIZES = {PRODUCT: ["m", "n", "k"], ATTENTION: ["head_dim", "causal", "backward", "tokens"]}
# FLOPs of attention's backward, in those of its forward.
BACKWARD = 2.5


@dataclass(frozen=True, slots=True)
class KernelRow:
    """A published rate of a kernel of the given sizes (``SIZES``), and where it is published."""

    device: str
    kind: str
    sizes: tuple[int, ...]
    tflops: float
    where: str

    @property
    def published_s(self) -> float:
        """Its published time, by the FLOPs that masks leave."""
        if self.kind == PRODUCT:
            return 2.0 * float(np.prod(self.sizes)) / (self.tflops * TERA)
        head_dim, causal, backward, tokens = self.sizes
        flops = float(Attention(head_dim, head_dim, bool(causal)).flops(np.array([tokens]))[0])
        return flops * (BACKWARD if backward else 1.0) / (self.tflops * TERA)

    def predicted_s(self, roofline: Roofline) -> float:
        """Its time on the roofline's device; of attention, one head's part of a large batch."""
        if self.kind == PRODUCT:
            m, n, k = self.sizes
            return float(roofline.gemm_s(Gemm(k, n), np.array([float(m)]), 1, 1)[0])
        head_dim, causal, backward, tokens = self.sizes
        attention = Attention(head_dim * LARGE, head_dim * LARGE, bool(causal), head_dim=head_dim)
        lengths = np.array([tokens])
        passes = roofline.attention_s(attention, score_area(attention, lengths), lengths.astype(np.float64), 1, 1)
        return float(passes[backward][0]) / LARGE

    def ratio(self, cluster: ClusterSpec) -> float:
        """Predicted over published; kernels alone run at the full clock, so nothing of training is in it."""
        alone = replace(cluster, device=replace(cluster.device, sustained_fraction=1.0))
        return self.predicted_s(Roofline(alone)) / self.published_s


def read_kernels() -> tuple[KernelRow, ...]:
    """The kernels of ``kernels.csv``."""
    rows = pd.read_csv(config_tree() / "ledger" / "kernels.csv").to_dict("records")
    return tuple(_kernel(row, row["device"], row["kernel"], row["where"]) for row in rows)


def read_products(devices: Mapping[str, str]) -> tuple[KernelRow, ...]:
    """Products in 16 bits of ``matmul_tflops.csv`` on devices that have constants.

    ``devices`` has the name of a device's YAML by the text in ``gpu_type``; rows of other devices are left out.
    """
    table = pd.read_csv(config_tree() / "ledger" / "matmul_tflops.csv")
    rows = table[table["gpu_type"].isin(devices) & table["dtype"].isin(HALF_PRECISION)].to_dict("records")
    return tuple(_kernel(row, devices[row["gpu_type"]], PRODUCT, f"{row['source']}, {row['where']}") for row in rows)


def _kernel(row: Mapping[Any, Any], device: str, kind: str, where: str) -> KernelRow:
    return KernelRow(device, kind, tuple(int(row[name]) for name in SIZES[kind]), float(row["tflops"]), where)


def compose_devices(devices: Iterable[str], composer: Composer) -> dict[str, ClusterSpec]:
    """A cluster of each device, by the name of its YAML; its links do not matter to kernels."""
    return {
        device: ClusterSpec.from_config(composer.run((f"cluster={device}x8",)).cluster) for device in sorted({*devices})
    }


def kernels_by_source_table(rows: Iterable[KernelRow], composer: Composer) -> Table:
    """A row for every device, kind of kernel and source; a kernel that two tables have counts once."""
    distinct = {(row.device, row.kind, row.sizes, row.tflops): row for row in reversed([*rows])}
    clusters = compose_devices((row.device for row in distinct.values()), composer)

    def group(row: KernelRow) -> tuple[str, str, str]:
        return row.device, row.kind, row.where.removeprefix("GitHub ").replace(",", " ").split()[0]

    lines = []
    for (device, kind, source), kernels in groupby(sorted(distinct.values(), key=group), key=group):
        ratios = [row.ratio(clusters[device]) for row in kernels]
        errors = [abs(ratio - 1.0) for ratio in ratios]
        numbers = f"{median(ratios):.3f}", f"{median(errors):.1%}", f"{max(errors):.0%}"
        lines.append([f"{device.upper()}, {kind}, {source}", str(len(ratios)), *numbers])
    return "Kernels by source", ("device, kernel, source", "number", "median ratio", "median error", "largest"), lines


@dataclass(frozen=True, slots=True)
class Forward:
    """A published range of a module's forward, and the program whose forwards are predicted.

    The range is of a microbatch over all stages, in milliseconds.
    """

    workload: str
    model: str
    module: str
    least_ms: float
    most_ms: float
    where: str
    truth: CostTruth
    program: Program

    def predicted_ms(self) -> float:
        """Mean over the microbatches."""
        truth = self.truth
        index = [module.name for module in truth.model.modules].index(self.module)
        placed = self.program.layout.modules[index]
        times = truth.chunk_times(truth.model.modules[index], placed, self.program.shapes, self.program.chunks[index])
        return 1e3 * float((times.forward_s + times.forward_comm_s).sum(axis=1).mean())


def plan_forwards(composer: Composer) -> Iterable[Forward]:
    """The ranges of ``forwards.csv``, each with a program on the default cluster and degrees.

    The mean over microbatches depends on no strategy, so layouts are planned with as few trials as possible.
    """
    planning = ("tuning=own", "strategy.planner.num_trials=1", "strategy.planner.profile_samples=16", "iterations=1")
    for row in pd.read_csv(config_tree() / "ledger" / "forwards.csv").to_dict("records"):
        job = f"workload={row['workload']}", f"model={row['model']}"
        setting, program = first_program(composer.run(("strategy=megatron", *planning, *job)))
        yield Forward(truth=setting.truth, program=program, **{str(name): value for name, value in row.items()})


def forwards_table(forwards: Iterable[Forward]) -> Table:
    """Published ranges and predicted times of forwards."""
    rows = []
    for forward in forwards:
        predicted_ms = forward.predicted_ms()
        inside = "yes" if forward.least_ms <= predicted_ms <= forward.most_ms else "no"
        published = f"{forward.least_ms:.0f} to {forward.most_ms:.0f}"
        name = f"{forward.workload}, {forward.model}, {forward.module}"
        rows.append([name, published, f"{predicted_ms:.0f}", inside])
    return "Forwards on the A40", ["forward", "published (ms)", "predicted (ms)", "inside"], rows
