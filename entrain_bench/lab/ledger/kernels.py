"""Published rates of single kernels (``experiments/ledger/kernels.csv``), and ranges of forwards (``forwards.csv``)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from entrain_bench.config.compose import Composer
from entrain_bench.config.tree import config_tree
from entrain_bench.costs.loads import score_area
from entrain_bench.costs.roofline import Roofline
from entrain_bench.costs.truth import CostTruth
from entrain_bench.lab.ledger.predict import Change
from entrain_bench.program import Program
from entrain_bench.run.experiment import prepare
from entrain_bench.specs.cluster import ClusterSpec
from entrain_bench.specs.layer import Attention, Gemm

TERA = 1e12
# Heads of a batch in which no kernel is bound by its launch.
LARGE = 1 << 20
# Matrix products ``[m, k] @ [k, n]``, and attention over sequences of one length.
PRODUCT = "product"
ATTENTION = "attention"
SIZES = {PRODUCT: ["m", "n", "k"], ATTENTION: ["head_dim", "causal", "backward", "tokens"]}
# FLOPs of attention's backward, in those of its forward.
BACKWARD = 2.5


@dataclass(frozen=True, slots=True)
class KernelRow:
    """A published rate of a kernel of the given sizes (``SIZES``) on a cluster, and where it is published."""

    device: str
    cluster: ClusterSpec
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

    def predicted_s(self, change: Change = lambda cluster: cluster) -> float:
        """Its predicted time, on the cluster or a changed one; of attention, one head's part of a large batch.

        Kernels alone run at the full clock, so nothing of training is in it.
        """
        cluster = change(self.cluster)
        roofline = Roofline(replace(cluster, device=replace(cluster.device, sustained_fraction=1.0)))
        if self.kind == PRODUCT:
            m, n, k = self.sizes
            return float(roofline.gemm_s(Gemm(k, n), np.array([float(m)]), 1, 1)[0])
        head_dim, causal, backward, tokens = self.sizes
        attention = Attention(head_dim * LARGE, head_dim * LARGE, bool(causal), head_dim=head_dim)
        lengths = np.array([tokens])
        passes = roofline.attention_s(attention, score_area(attention, lengths), lengths.astype(np.float64), 1, 1)
        return float(passes[backward][0]) / LARGE


def read_kernels(composer: Composer) -> tuple[KernelRow, ...]:
    """The kernels of ``kernels.csv``; links of their clusters do not matter."""
    rows = pd.read_csv(config_tree() / "ledger" / "kernels.csv").to_dict("records")
    runs = {device: composer.run((f"cluster={device}x8",)) for device in sorted({row["device"] for row in rows})}
    clusters = {device: ClusterSpec.from_config(run.cluster) for device, run in runs.items()}
    sizes = [tuple(int(row[name]) for name in SIZES[row["kernel"]]) for row in rows]
    return tuple(
        KernelRow(row["device"], clusters[row["device"]], row["kernel"], of_row, row["tflops"], row["where"])
        for row, of_row in zip(rows, sizes, strict=True)
    )


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

    def predicted_ms(self, change: Change = lambda cluster: cluster) -> float:
        """Mean over the microbatches, on the cluster or a changed one."""
        truth = replace(self.truth, cluster=change(self.truth.cluster))
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
        config = composer.run(("strategy=megatron", *planning, *job))
        setting = prepare(config)
        shapes = setting.source.batch(0, config.global_batch, config.seed)
        program = setting.strategy.program(shapes, setting.plan(), setting.profile)
        yield Forward(truth=setting.truth, program=program, **{str(name): value for name, value in row.items()})
