"""Published times, ready to be predicted again and again: the program stays, the device changes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from entrain_bench.config.compose import Composer
from entrain_bench.costs.truth import CostTruth
from entrain_bench.lab.calibration.anchors import Anchor, ForwardAnchor
from entrain_bench.lab.programs import first_program
from entrain_bench.program import Program
from entrain_bench.simulate import Simulator
from entrain_bench.specs.cluster import DeviceSpec


@dataclass(frozen=True, slots=True)
class ReferencePoint[Published: (Anchor, ForwardAnchor)]:
    """A published time, its program, and the cost model that its configuration describes."""

    anchor: Published
    truth: CostTruth
    program: Program

    @classmethod
    def of(cls, anchor: Published, composer: Composer) -> Self:
        """Plan the layout of an anchor and build its program."""
        setting, program = first_program(composer.run(anchor.overrides))
        return cls(anchor, setting.truth, program)

    @property
    def device(self) -> DeviceSpec:
        """The configured device."""
        return self.truth.cluster.device

    def on(self, device: DeviceSpec) -> CostTruth:
        """Return the cost model of another device."""
        return replace(self.truth, cluster=replace(self.truth.cluster, device=device))


@dataclass(frozen=True, slots=True)
class IterationPoint(ReferencePoint[Anchor]):
    """A published iteration time."""

    def ratio(self, device: DeviceSpec) -> float:
        """Predicted over published."""
        simulator = Simulator(self.on(device), np.inf)
        return simulator.execute(self.program).iteration_time_s / self.anchor.published_s


@dataclass(frozen=True, slots=True)
class ForwardPoint(ReferencePoint[ForwardAnchor]):
    """A published range of a module's forwards."""

    def predicted_ms(self, device: DeviceSpec) -> float:
        """Mean over the microbatches."""
        index = [module.name for module in self.truth.model.modules].index(self.anchor.module)
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
