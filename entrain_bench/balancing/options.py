"""Options of planners, assigners and schedulers; their types say which values are allowed (``specs.parse``)."""

from dataclasses import dataclass, field
from typing import Annotated

from entrain_bench.specs.parse import Count, OneOf, at_least

Amount = Annotated[int, at_least(0)]
Memory = Annotated[str, OneOf(("module", "stage", "greedy"))]
Eager = Annotated[str, OneOf(("none", "encoder", "all"))]


@dataclass(frozen=True, slots=True)
class TrialOptions:
    """Options of a planner that rates layouts by profiled samples and tries the best.

    Attributes:
        profile_samples: samples averaged into one shape.
        num_trials: best estimates that fit memory and run a profiled batch on trial; 1: none runs.
    """

    profile_samples: Count = field(default=256, kw_only=True)
    num_trials: Count = field(default=8, kw_only=True)
