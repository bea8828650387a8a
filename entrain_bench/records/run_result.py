"""The result of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from entrain_bench.program.layout import Layout
from entrain_bench.specs.workload import Counts

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a run.

    Attributes:
        layout: the planned layout.
        metrics: means over iterations by table column.
        iterations: the metrics of each iteration.
        timeline: the first iteration's timeline as a table; None if it is too large to keep.
        samples: of a workload that lists its samples their number (``listed``), and how many the model's context
            changed (``truncated``, ``dropped``); of a mixture the same by component, with its ``share``; else empty.
        execution: of a training run, what it ran with by name: device, dtype, kernels, versions of packages.
        remarks: what a reader of its metrics should know, a line each.
    """

    layout: Layout
    metrics: Mapping[str, float]
    iterations: tuple[Mapping[str, float], ...]
    timeline: pd.DataFrame | None
    samples: Counts = field(default_factory=dict)
    execution: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
