"""Published times, and the run that predicts each (``experiments/anchors.yaml``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from entrain_bench.base.errors import require
from entrain_bench.config.compose import Composer
from entrain_bench.config.tree import config_tree
from entrain_bench.costs.loads import score_area
from entrain_bench.costs.roofline import Roofline
from entrain_bench.specs.cluster import ClusterSpec, DeviceSpec
from entrain_bench.specs.layer import Attention, Gemm
from entrain_bench.specs.parse import check_mapping, parse

HALVES = ("fit", "test")
# GPUs of a node on all clusters of anchors.
NODE = 8
# Memory is not what is tested: every published run fitted its devices.
MEMORY_BYTES = 1e13
TERA = 1e12
# Heads of a batch in which no kernel is bound by its launch.
LARGE = 1 << 20


@dataclass(frozen=True, slots=True)
class Settings:
    """Degrees and sizes of a run; ``pp`` counts the ranks of a pipeline, each with ``virtual_stages``."""

    model: str
    sequence_tokens: int
    tp: int
    cp: int
    pp: int
    virtual_stages: int
    microbatch_size: int


@dataclass(frozen=True, slots=True)
class Group:
    """A published table or study: its device's YAML, what ran in words, and where and when it stands."""

    name: str
    device: str
    framework: str
    source: str


@dataclass(frozen=True, slots=True)
class Anchor:
    """A published iteration time, to which constants are fitted or on which they are tested (its ``half``)."""

    group: Group
    settings: Settings
    gpus: int
    global_batch: int
    published_s: float
    half: str
    more: tuple[str, ...]

    @property
    def dp(self) -> int:
        """Replicas."""
        return self.gpus // (self.settings.tp * self.settings.cp * self.settings.pp)

    @property
    def overrides(self) -> tuple[str, ...]:
        """The run that predicts it, through the Megatron-style strategy with given degrees."""
        own, device = self.settings, self.group.device
        return (
            "strategy=megatron",
            "strategy.planner.split=uniform",
            "strategy.planner.profile_samples=1",
            "tuning=own",
            "strategy.planner.num_trials=1",
            f"strategy.planner.virtual_stages={own.virtual_stages}",
            "workload=packed_text",
            f"workload.text={own.sequence_tokens}",
            f"model={own.model}",
            f"cluster={device}x64",
            f"cluster.name={device}x{self.gpus}",
            f"cluster.num_nodes={self.gpus // NODE}",
            f"cluster.device.memory_bytes={MEMORY_BYTES:.0e}",
            f"layout.tp={own.tp}",
            f"layout.cp={own.cp}",
            f"layout.dp={self.dp}",
            f"global_batch={self.global_batch}",
            f"microbatch_size={own.microbatch_size}",
            "iterations=1",
            *self.more,
        )


@dataclass(frozen=True, slots=True)
class ForwardAnchor:
    """The published range of a module's forward, a microbatch's over all stages: least and greatest."""

    group: Group
    workload: str
    model: str
    module: str
    published_ms: tuple[float, float]

    @property
    def overrides(self) -> tuple[str, ...]:
        """The run whose microbatches are compared: of any strategy, for their mean does not depend on it."""
        return ("strategy=megatron", f"workload={self.workload}", f"model={self.model}", "iterations=1")


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


type Kernel = Product | AttentionKernel


@dataclass(frozen=True, slots=True)
class KernelPoint:
    """A published kernel on a cluster's device."""

    cluster: ClusterSpec
    kernel: Kernel

    @classmethod
    def of(cls, device: str, kernel: Kernel, composer: Composer) -> KernelPoint:
        """Return the kernel on the device that it was published for, by the name of its YAML."""
        return cls(ClusterSpec.from_config(composer.run((f"cluster={device}x64",)).cluster), kernel)

    def ratio(self, device: DeviceSpec) -> float:
        """Predicted over published; kernels alone run at the full clock, so nothing of training is in it."""
        alone = replace(self.cluster, device=replace(device, sustained_fraction=1.0))
        return self.kernel.predicted_s(Roofline(alone)) / self.kernel.published_s


@dataclass(frozen=True, slots=True)
class Anchors:
    """All published times, kernels with their device; ``toggles`` replace overrides of a run, by what they assume."""

    iterations: tuple[Anchor, ...]
    forwards: tuple[ForwardAnchor, ...]
    kernels: tuple[tuple[str, Kernel], ...]
    toggles: Mapping[str, tuple[str, ...]]

    @property
    def runs(self) -> list[tuple[str, ...]]:
        """Overrides of the run behind every iteration and every forward."""
        return [*(each.overrides for each in self.iterations), *(each.overrides for each in self.forwards)]

    def toggled(self) -> Iterator[tuple[Anchor, list[tuple[str, ...]]]]:
        """The first anchor of every group, and its overrides under every toggle."""
        for _, rows in groupby(self.iterations, key=lambda anchor: anchor.group):
            anchor = next(rows)
            yield anchor, [toggled(anchor.overrides, changes) for changes in self.toggles.values()]

    @property
    def groups(self) -> list[Group]:
        """All groups, in the order of the file."""
        groups = [*(anchor.group for anchor in self.iterations), *(anchor.group for anchor in self.forwards)]
        return [*dict.fromkeys(groups)]


def load_anchors(path: Path | None = None) -> Anchors:
    """The committed anchors, or those of a file; ``UserError`` names file, group and what is wrong."""
    path = path or config_tree() / "anchors.yaml"
    values = check_mapping(yaml.safe_load(path.read_text()), path.name)
    toggles = {str(name): tuple(map(str, changes)) for name, changes in values["toggles"].items()}
    return Anchors(
        tuple(_iteration(*row) for row in _grouped(values["iterations"], path.name)),
        tuple(_forward(group, row, where) for group, _, where, row in _grouped(values["forwards"], path.name)),
        tuple(_kernels(values, path.name)),
        toggles,
    )


def toggled(overrides: Sequence[str], changes: Sequence[str]) -> tuple[str, ...]:
    """A run's overrides with others in place of those of the same keys."""
    return tuple({text.partition("=")[0]: text for text in (*overrides, *changes)}.values())


def _grouped(groups: Sequence[Mapping[str, Any]], file: str) -> Iterator[tuple[Group, Mapping[str, Any], str, Any]]:
    """Every row of the groups: its group, the group's values, where it stands, and the row."""
    for values in groups:
        where = f"{file}: {values['name']}"
        texts = {key: " ".join(str(values[key]).split()) for key in ("name", "device", "framework", "source")}
        group = parse(Group, texts, where)
        yield from ((group, values, where, row) for row in values["rows"])


def _iteration(group: Group, values: Mapping[str, Any], where: str, row: Mapping[str, Any]) -> Anchor:
    settings = parse(Settings, {**values["settings"], **row.get("settings", {})}, f"{where}: settings")
    anchor = parse(Anchor, {**row, "group": group, "settings": settings, "more": [*values["overrides"]]}, where)
    require(anchor.half in HALVES, f"{where}: half", anchor.half, f"one of {', '.join(HALVES)}")
    require(anchor.published_s > 0, f"{where}: published_s", anchor.published_s, "positive")
    product = settings.tp * settings.cp * settings.pp
    whole = anchor.gpus % product == 0 and anchor.gpus % NODE == 0
    require(whole, f"{where}: gpus", anchor.gpus, f"a multiple of TP x CP x PP = {product} and of {NODE}")
    return anchor


def _forward(group: Group, row: Mapping[str, Any], where: str) -> ForwardAnchor:
    anchor = parse(ForwardAnchor, {**row, "group": group}, where)
    ends = anchor.published_ms
    require(len(ends) == 2 and 0 < ends[0] <= ends[1], f"{where}: published_ms", [*ends], "the least and the greatest")
    return anchor


def _kernels(values: Mapping[str, Any], file: str) -> Iterator[tuple[str, Kernel]]:
    """Products from rows of m, n, k and TFLOP/s; attention from rows of rates, one for each of the lengths."""
    for group in values["products"]:
        for row in group["rows"]:
            product = dict(zip(("m", "n", "k", "tflops"), row, strict=True))
            yield group["device"], parse(Product, product, f"{file}: products of {group['device']}")
    for group in values["attention"]:
        for row in group["rows"]:
            for tokens, tflops in zip(group["tokens"], row["tflops"], strict=True):
                kernel = {**row, "tokens": tokens, "tflops": tflops}
                yield group["device"], parse(AttentionKernel, kernel, f"{file}: attention of {group['device']}")
