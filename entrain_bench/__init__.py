"""One suite for load-balancing strategies of multimodal-LLM training: plan, schedule, simulate, measure, compare.

The names here are for scripts and notebooks; each is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from entrain_bench.balancing.profile import Profile
    from entrain_bench.base.errors import UserError
    from entrain_bench.config.compose import compose
    from entrain_bench.program import Program
    from entrain_bench.program.assignment import Assignment
    from entrain_bench.program.layout import Layout
    from entrain_bench.program.timeline import Timeline
    from entrain_bench.records.metrics import measure, metric
    from entrain_bench.run.experiment import prepare, run_experiment
    from entrain_bench.sampler import BalancedBatchSampler
    from entrain_bench.specs.shapes import Items, SampleShapes, shapes_of
    from entrain_bench.specs.workload import ListedShapes

_HOMES = {
    "Assignment": "program.assignment",
    "BalancedBatchSampler": "sampler",
    "Items": "specs.shapes",
    "Layout": "program.layout",
    "ListedShapes": "specs.workload",
    "Profile": "balancing.profile",
    "Program": "program",
    "SampleShapes": "specs.shapes",
    "Timeline": "program.timeline",
    "UserError": "base.errors",
    "compose": "config.compose",
    "measure": "records.metrics",
    "metric": "records.metrics",
    "prepare": "run.experiment",
    "run_experiment": "run.experiment",
    "shapes_of": "specs.shapes",
}

__all__ = [
    "Assignment",
    "BalancedBatchSampler",
    "Items",
    "Layout",
    "ListedShapes",
    "Profile",
    "Program",
    "SampleShapes",
    "Timeline",
    "UserError",
    "compose",
    "measure",
    "metric",
    "prepare",
    "run_experiment",
    "shapes_of",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
