"""Anchors made ready to be predicted again and again: the program stays, the device changes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from entrain_bench.config.compose import Composer
from entrain_bench.costs.truth import CostTruth
from entrain_bench.lab.calibration.anchors import Anchor, ForwardAnchor, KernelAnchor
from entrain_bench.lab.calibration.kernels import KernelCase
from entrain_bench.program import Program
from entrain_bench.run.experiment import prepare
from entrain_bench.simulate import Simulator
from entrain_bench.specs.cluster import ClusterSpec, DeviceSpec


@dataclass(frozen=True, slots=True)
class Case:
    """An anchor's program and the truth that its configuration describes."""

    truth: CostTruth
    program: Program

    @property
    def device(self) -> DeviceSpec:
        """The configured device."""
        return self.truth.cluster.device

    def on(self, device: DeviceSpec) -> CostTruth:
        """The truth on another device."""
        return replace(self.truth, cluster=replace(self.truth.cluster, device=device))


@dataclass(frozen=True, slots=True)
class IterationCase(Case):
    """A published iteration time."""

    anchor: Anchor

    def ratio(self, device: DeviceSpec) -> float:
        """Predicted over published."""
        simulator = Simulator(self.on(device), np.inf)
        return simulator.execute(self.program).iteration_time_s / self.anchor.published_s


@dataclass(frozen=True, slots=True)
class ForwardCase(Case):
    """A published range of a module's forwards."""

    anchor: ForwardAnchor

    def predicted_ms(self, device: DeviceSpec) -> float:
        """Mean over the microbatches."""
        names = [module.name for module in self.truth.model.modules]
        index = names.index(self.anchor.module)
        module, placed = self.truth.model.modules[index], self.program.layout.modules[index]
        times = self.on(device).chunk_times(module, placed, self.program.shapes, self.program.chunks[index])
        return 1e3 * float((times.forward_s + times.forward_comm_s).sum(axis=1).mean())

    def ratio(self, device: DeviceSpec) -> float:
        """Predicted over the middle of the range."""
        low, high = self.anchor.published_ms
        return self.predicted_ms(device) / ((low + high) / 2)

    def inside(self, device: DeviceSpec) -> bool:
        """Whether the prediction lies in the range."""
        low, high = self.anchor.published_ms
        return low <= self.predicted_ms(device) <= high


def iteration_case(anchor: Anchor, composer: Composer) -> IterationCase:
    """Plan an anchor's layout and make its program."""
    return IterationCase(*_planned(anchor.overrides, composer), anchor)


def forward_case(anchor: ForwardAnchor, composer: Composer) -> ForwardCase:
    """Plan the run of a range and make its program."""
    return ForwardCase(*_planned(anchor.overrides, composer), anchor)


def kernel_case(anchor: KernelAnchor, composer: Composer) -> KernelCase:
    """A kernel on the device it was published for."""
    config = composer.run((f"cluster={anchor.device}x64",))
    return KernelCase(ClusterSpec.from_config(config.cluster), anchor.kernel)


def _planned(overrides: tuple[str, ...], composer: Composer) -> tuple[CostTruth, Program]:
    config = composer.run(overrides)
    setting = prepare(config)
    layout = setting.strategy.plan(setting.profile)
    shapes = setting.source.batch(0, setting.job.global_batch, config.seed)
    return setting.truth, setting.strategy.program(shapes, layout, setting.profile)
