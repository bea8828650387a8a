"""DIP (arXiv:2504.14145; formerly PipeWeaver): every module on every rank of a replica, images cut finer than the LLM.

Modality-aware partitioner (``partitioner``), sub-microbatches (``assigner``), greedy dual-queue interleaver
(``interleaver``) and the search over segment priorities (``scheduler``).
"""

from strategies.dip.assigner import DipAssigner
from strategies.dip.partitioner import DipPlanner
from strategies.dip.scheduler import DipScheduler

__all__ = ["DipAssigner", "DipPlanner", "DipScheduler"]
