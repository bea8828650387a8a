"""FlexSP (arXiv:2412.01523): sharded weights, and groups of widths that a solver chooses for every microbatch."""

from .assigner import FlexibleGroups
from .planner import FlexPlanner
from .scheduler import ShardedRounds

__all__ = ["FlexPlanner", "FlexibleGroups", "ShardedRounds"]
