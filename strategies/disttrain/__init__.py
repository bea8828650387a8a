"""DistTrain (arXiv:2408.04275): disaggregated encoder and LLM, and samples reordered before they reach the trainers.

Orchestration as a convex problem (``orchestration``, ``planner``), 1F1B over a chain whose groups differ in DP
(``planner``), intra- and inter-microbatch reordering (``assigner``). No code is public; what was reconstructed is
listed in docs/strategies/disttrain.md.
"""

from .assigner import DistTrainAssigner
from .planner import DistTrainPlanner, DistTrainScheduler

__all__ = ["DistTrainAssigner", "DistTrainPlanner", "DistTrainScheduler"]
