"""One suite for load-balancing strategies of multimodal-LLM training: plan, schedule, simulate, measure, compare.

The names here are for scripts and notebooks; each is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from entrain_bench.balancing.profile import Profile as Profile
    from entrain_bench.base.errors import UserError as UserError
    from entrain_bench.config.compose import compose as compose
    from entrain_bench.notebook import load as load
    from entrain_bench.notebook import plot as plot
    from entrain_bench.notebook import recommend as recommend
    from entrain_bench.notebook import show as show
    from entrain_bench.notebook import sweep as sweep
    from entrain_bench.program import Program as Program
    from entrain_bench.program.assignment import Assignment as Assignment
    from entrain_bench.program.layout import Layout as Layout
    from entrain_bench.program.timeline import Timeline as Timeline
    from entrain_bench.records.metrics import measure as measure
    from entrain_bench.records.metrics import metric as metric
    from entrain_bench.run.experiment import prepare as prepare
    from entrain_bench.run.experiment import run_experiment as run_experiment
    from entrain_bench.sampler import BalancedBatchSampler as BalancedBatchSampler
    from entrain_bench.specs.shapes import Items as Items
    from entrain_bench.specs.shapes import SampleShapes as SampleShapes
    from entrain_bench.specs.shapes import shapes_of as shapes_of
    from entrain_bench.specs.workload import ListedShapes as ListedShapes

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
    "load": "notebook",
    "measure": "records.metrics",
    "metric": "records.metrics",
    "plot": "notebook",
    "prepare": "run.experiment",
    "recommend": "notebook",
    "run_experiment": "run.experiment",
    "shapes_of": "specs.shapes",
    "show": "notebook",
    "sweep": "notebook",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*_HOMES]
