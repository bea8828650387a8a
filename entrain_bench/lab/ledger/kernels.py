"""Published rates of single kernels, and ranges of forwards, that constants are fitted to or compared with.

``experiments/ledger`` holds them: ``kernels.csv``, to which constants of size are fitted; ``matmul_tflops.csv``, which
is compared alone; and ``forwards.csv``, the axes of two figures on the A40.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import median

import numpy as np

from entrain_bench.base.arrays import FloatArray
from entrain_bench.base.errors import UserError, require, unknown_choice
from entrain_bench.config.compose import Composer
from entrain_bench.config.tree import config_tree
from entrain_bench.costs.loads import score_area
from entrain_bench.costs.roofline import Roofline
from entrain_bench.costs.truth import CostTruth
from entrain_bench.lab.fidelity.programs import first_program
from entrain_bench.lab.ledger.fit import Interval, Knob, Point, fit_points
from entrain_bench.lab.ledger.predict import Change
from entrain_bench.lab.ledger.tables import Table
from entrain_bench.program import Program
from entrain_bench.specs.cluster import ClusterSpec
from entrain_bench.specs.layer import Attention, Gemm

TERA = 1e12
# Heads of a batch in which no kernel is bound by its launch.
LARGE = 1 << 20
HALF_PRECISION = ("bf16", "fp16")
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

    def ratio(self, cluster: ClusterSpec) -> float:
        """Predicted over published; kernels alone run at the full clock, so nothing of training is in it."""
        alone = replace(cluster, device=replace(cluster.device, sustained_fraction=1.0))
        return self.kernel.predicted_s(Roofline(alone)) / self.kernel.published_s

    def point(self, cluster: ClusterSpec, changes: Callable[[FloatArray], Change]) -> Point:
        """Itself as a point of a fit, on a cluster that factors change; the error of its rate is given."""
        seconds = self.kernel.published_s

        def predict(factors: FloatArray) -> Interval:
            predicted_s = self.ratio(changes(factors)(cluster)) * seconds
            return predicted_s, predicted_s

        return Point(self.where, cluster.device.name, (seconds, seconds), predict, ERROR)

    def sized_point(self, cluster: ClusterSpec) -> Point:
        """Itself as a point of a fit of its kind's ``KNOBS``."""
        names = [knob.name for knob in KNOBS[self.kind]]

        def changes(factors: FloatArray) -> Change:
            named = zip(names, factors.tolist(), strict=True)
            values = {name: getattr(cluster.device, name) * factor for name, factor in named}
            return lambda cluster: replace(cluster, device=replace(cluster.device, **values))

        return self.point(cluster, changes)


def read_kernels(path: Path | None = None) -> tuple[KernelRow, ...]:
    """All rows of a file (default: the committed one); ``UserError`` names file, line and field."""
    path = path or config_tree() / "ledger" / "kernels.csv"
    with path.open(newline="") as lines:
        return tuple(_kernel(f"{path.name}:{line}", values) for line, values in enumerate(csv.DictReader(lines), 2))


def _kernel(place: str, values: Mapping[str, str]) -> KernelRow:
    def number(name: str) -> float:
        try:
            value = float(values[name])
        except ValueError:
            value = 0.0
        if value <= 0:
            raise UserError(f"{place}: {name}={values[name]}: must be a positive number")
        return value

    rate = number("tflops")
    if values["kernel"] not in KINDS:
        raise unknown_choice(f"{place}: kernel", values["kernel"], KINDS)
    if values["kernel"] == PRODUCT:
        m, n, k = (int(number(name)) for name in ("m", "n", "k"))
        return KernelRow(values["device"], Product(m, n, k, rate), values["where"])
    causal, backward = (values[name] == "true" for name in ("causal", "backward"))
    attention = AttentionKernel(int(number("head_dim")), causal, backward, int(number("tokens")), rate)
    return KernelRow(values["device"], attention, values["where"])


def read_products(devices: Mapping[str, str], path: Path | None = None) -> tuple[KernelRow, ...]:
    """Products in 16 bits of a table (default: the committed one) on devices that have constants.

    ``devices`` has the name of a device's YAML by the text in ``gpu_type``; rows of other devices are left out.
    """
    path = path or config_tree() / "ledger" / "matmul_tflops.csv"
    with path.open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["gpu_type"] in devices and row["dtype"] in HALF_PRECISION]
    return tuple(
        KernelRow(
            devices[row["gpu_type"]],
            Product(int(row["m"]), int(row["n"]), int(row["k"]), float(row["tflops"])),
            f"{row['source']}, {row['where']}",
        )
        for row in rows
    )


class DeviceClusters:
    """A cluster of each device, by the name of its YAML; each is composed once."""

    def __init__(self, composer: Composer) -> None:
        self._composer = composer
        self._known: dict[str, ClusterSpec] = {}

    def cluster(self, device: str) -> ClusterSpec:
        """A cluster of the device; its links do not matter to kernels."""
        if device not in self._known:
            self._known[device] = ClusterSpec.from_config(self._composer.run((f"cluster={device}x8",)).cluster)
        return self._known[device]


def fitted_kernels_table(composer: Composer) -> Table:
    """Constants fitted to each device's kernels, and errors of the committed constants."""
    rows = []
    clusters = DeviceClusters(composer)
    for (device, kind), group in groupby(read_kernels(), key=lambda row: (row.device, row.kind)):
        kernels = [*group]
        cluster = clusters.cluster(device)
        fit = fit_points([row.sized_point(cluster) for row in kernels], KNOBS[kind], iterations=4)
        factors = zip(KNOBS[kind], fit.factors(cluster.device.name).tolist(), strict=True)
        fitted = [f"{knob.name} {getattr(cluster.device, knob.name) * factor:.2g}" for knob, factor in factors]
        errors = [abs(row.ratio(cluster) - 1.0) for row in kernels]
        shown = [f"{100 * median(errors):.0f}%", f"{100 * max(errors):.0f}%", ", ".join(fitted)]
        rows.append([f"{device}, {kind}", str(len(errors)), *shown])
    return "Kernels", ["kernels", "number", "median error", "largest error", "fitted"], rows


def kernels_by_source_table(rows: Iterable[KernelRow], composer: Composer) -> Table:
    """A row for every device, kind of kernel and source; a kernel that two tables have counts once."""
    clusters = DeviceClusters(composer)
    distinct = {(row.device, row.kernel): row for row in reversed([*rows])}

    def group(row: KernelRow) -> tuple[str, str, str]:
        return row.device, row.kind, row.where.removeprefix("GitHub ").replace(",", " ").split()[0]

    lines = []
    for (device, kind, source), kernels in groupby(sorted(distinct.values(), key=group), key=group):
        ratios = [row.ratio(clusters.cluster(device)) for row in kernels]
        errors = [abs(ratio - 1.0) for ratio in ratios]
        numbers = f"{median(ratios):.3f}", f"{median(errors):.1%}", f"{max(errors):.0%}"
        lines.append([f"{device.upper()}, {kind}, {source}", str(len(ratios)), *numbers])
    return "Kernels by source", ("device, kernel, source", "number", "median ratio", "median error", "largest"), lines


@dataclass(frozen=True, slots=True)
class ForwardRow:
    """The published range of a module's forward: a microbatch's over all stages, in milliseconds."""

    workload: str
    model: str
    module: str
    least_ms: float
    most_ms: float
    where: str

    @property
    def overrides(self) -> tuple[str, ...]:
        """The run whose microbatches are compared, on the default cluster and degrees.

        The mean over microbatches depends on no strategy, so the layout is planned with as few trials as possible.
        """
        planning = ("tuning=own", "strategy.planner.num_trials=1", "strategy.planner.profile_samples=16")
        return "strategy=megatron", *planning, f"workload={self.workload}", f"model={self.model}", "iterations=1"


@dataclass(frozen=True, slots=True)
class ForwardCase:
    """A range with the program whose forwards are predicted."""

    row: ForwardRow
    truth: CostTruth
    program: Program

    def predicted_ms(self, change: Change | None = None) -> float:
        """Mean over the microbatches, on the cluster or on a changed one."""
        truth = replace(self.truth, cluster=change(self.truth.cluster)) if change else self.truth
        index = [module.name for module in truth.model.modules].index(self.row.module)
        module = truth.model.modules[index]
        placed = self.program.layout.modules[index]
        times = truth.chunk_times(module, placed, self.program.shapes, self.program.chunks[index])
        return 1e3 * float((times.forward_s + times.forward_comm_s).sum(axis=1).mean())

    def point(self, changes: Callable[[FloatArray], Change]) -> Point:
        """Itself as a point of a fit: any time in the range is as good."""

        def predict(factors: FloatArray) -> Interval:
            seconds = self.predicted_ms(changes(factors)) / 1e3
            return seconds, seconds

        published_s = self.row.least_ms / 1e3, self.row.most_ms / 1e3
        return Point(self.row.where, self.truth.cluster.device.name, published_s, predict)


def plan_forward(row: ForwardRow, composer: Composer) -> ForwardCase:
    """Plan a range's layout and build its program."""
    setting, program = first_program(composer.run(row.overrides))
    return ForwardCase(row, setting.truth, program)


def read_forwards(path: Path | None = None) -> tuple[ForwardRow, ...]:
    """All rows of a file (default: the committed one); ``UserError`` names file, line and field."""
    path = path or config_tree() / "ledger" / "forwards.csv"
    with path.open(newline="") as lines:
        return tuple(_forward(f"{path.name}:{line}", values) for line, values in enumerate(csv.DictReader(lines), 2))


def _forward(place: str, values: Mapping[str, str]) -> ForwardRow:
    least = float(values["least_ms"])
    most = float(values["most_ms"])
    require(0 < least <= most, f"{place}: least_ms", least, f"above 0 and at most most_ms={most:g}")
    return ForwardRow(values["workload"], values["model"], values["module"], least, most, values["where"])


def forwards_table(cases: Iterable[ForwardCase]) -> Table:
    """Published ranges and predicted times of forwards."""
    rows = []
    for case in cases:
        row = case.row
        predicted_ms = case.predicted_ms()
        inside = "yes" if row.least_ms <= predicted_ms <= row.most_ms else "no"
        published = f"{row.least_ms:.0f} to {row.most_ms:.0f}"
        rows.append([f"{row.workload}, {row.model}, {row.module}", published, f"{predicted_ms:.0f}", inside])
    return "Forwards on the A40", ["forward", "published (ms)", "predicted (ms)", "inside"], rows
