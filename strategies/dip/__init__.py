"""DIP (arXiv:2504.14145): segments of all modules interleaved on the ranks of one pipeline by a searched order."""

from .partitioner import DipAssigner, DipPlanner
from .scheduler import DipScheduler

__all__ = ["DipAssigner", "DipPlanner", "DipScheduler"]
