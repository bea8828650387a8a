"""Braid, this project's own: longest first on groups of several widths, or in pipelines where they pay."""

from .assigner import BraidAssigner
from .planner import BraidPlanner

__all__ = ["BraidAssigner", "BraidPlanner"]
