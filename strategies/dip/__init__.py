"""DIP (arXiv:2504.14145; formerly PipeWeaver): every module on every rank of a replica, images cut finer than the LLM.

Modality-aware partitioner (``partitioner``), sub-microbatches (``assigner``) and the search over segment priorities
(``scheduler``, ``search``), whose greedy dual-queue interleaver is ``entrain_bench.balancing.listing``.
"""

from .assigner import DipAssigner
from .partitioner import DipPlanner
from .scheduler import DipScheduler

__all__ = ["DipAssigner", "DipPlanner", "DipScheduler"]
