"""Entrain (Jang and Chowdhury, arXiv:2605.27918): one static layout, then deferral of excess LLM work.

Algorithms 1 and 2 (``planner``), Algorithm 3 (``assigner``), split backward and eager forward (``scheduler``).
"""

from strategies.entrain.assigner import EntrainAssigner
from strategies.entrain.planner import EntrainPlanner
from strategies.entrain.scheduler import EntrainScheduler

__all__ = ["EntrainAssigner", "EntrainPlanner", "EntrainScheduler"]
