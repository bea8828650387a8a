"""Heterogeneous parallelism (arXiv:2605.27678): every module has degrees of its own, and data is left as it comes.

Layouts by exhaustive search (``planner``), the batch-dimension transform (``assigner``), three-phase and graph-aware
1F1B schedules (``scheduler``).
"""

from .assigner import BatchSlices
from .planner import ColocatedPlanner, NoncolocatedPlanner
from .scheduler import ColocatedScheduler, GraphAwareScheduler

__all__ = ["BatchSlices", "ColocatedPlanner", "ColocatedScheduler", "GraphAwareScheduler", "NoncolocatedPlanner"]
