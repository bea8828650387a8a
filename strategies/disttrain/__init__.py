"""DistTrain (arXiv:2408.04275): disaggregated encoder and LLM, samples reordered; reconstructed without public code."""

from .assigner import DistTrainAssigner
from .planner import DistTrainPlanner, DistTrainScheduler

__all__ = ["DistTrainAssigner", "DistTrainPlanner", "DistTrainScheduler"]
