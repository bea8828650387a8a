"""Braid, this project's own: encoders and LLM on all ranks of a replica, encoder work where the LLM leaves time."""

from .assigner import BraidAssigner
from .planner import BraidPlanner
from .scheduler import BraidScheduler

__all__ = ["BraidAssigner", "BraidPlanner", "BraidScheduler"]
