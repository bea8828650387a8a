"""Entrain (Jang and Chowdhury, arXiv:2605.27918): one static layout, then deferral of excess LLM work.

Algorithms 1 and 2, split backward and eager forward (``planner``); Algorithm 3, and deferral alone, for other systems
(``assigner``).
"""

from .assigner import DeferringAssigner, EntrainAssigner
from .planner import EntrainPlanner, EntrainScheduler

__all__ = ["DeferringAssigner", "EntrainAssigner", "EntrainPlanner", "EntrainScheduler"]
