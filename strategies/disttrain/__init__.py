"""DistTrain (arXiv:2408.04275): disaggregated encoder and LLM, and samples reordered before they reach the trainers.

No code is public; what was reconstructed is listed in docs/strategies/disttrain.md.
"""

from .assigner import DistTrainAssigner
from .planner import DistTrainPlanner, DistTrainScheduler

__all__ = ["DistTrainAssigner", "DistTrainPlanner", "DistTrainScheduler"]
