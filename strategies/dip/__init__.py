"""DIP (arXiv:2504.14145; formerly PipeWeaver): every module on every rank of a replica, images cut finer than the LLM.

Modality-aware partitioner and sub-microbatches (``partitioner``), and the search over segment priorities
(``scheduler``), whose greedy dual-queue interleaver is ``entrain_bench.balancing.listing``.
"""

from .partitioner import DipAssigner, DipPlanner
from .scheduler import DipScheduler

__all__ = ["DipAssigner", "DipPlanner", "DipScheduler"]
