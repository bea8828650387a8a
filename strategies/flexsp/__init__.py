"""FlexSP (arXiv:2412.01523): sharded weights, and groups of widths that a solver chooses for every microbatch."""

from .assigner import FlexibleGroups

__all__ = ["FlexibleGroups"]
