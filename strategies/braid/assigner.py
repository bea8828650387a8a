"""Samples to groups as wide as they need, or to pipelines, longest first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from entrain_bench.balancing.profile import Profile
from entrain_bench.program.assignment import Assignment
from entrain_bench.program.layout import Layout
from entrain_bench.specs.shapes import SampleShapes
from entrain_bench_strategies.lpt import LongestFirst, LongestFirstOnWidths


@dataclass(frozen=True, slots=True)
class BraidAssigner:
    """Deals by ``lpt_widths`` where the layout has several widths, otherwise by ``lpt``."""

    handles_generators: ClassVar[bool] = True
    handles_widths: ClassVar[bool] = True
    chooses_microbatches: ClassVar[bool] = True

    def assign(self, shapes: SampleShapes, layout: Layout, profile: Profile) -> Assignment:
        """Labels of all units."""
        dealer = LongestFirstOnWidths() if layout.modules[0].widths else LongestFirst()
        return dealer.assign(shapes, layout, profile)
