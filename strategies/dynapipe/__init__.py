"""DynaPipe (arXiv:2311.10418): microbatches cut from sorted samples by a dynamic program, and an adaptive schedule.

What a microbatch is believed to take on every stage (``costs``), the cuts (``assigner``), and the order
of the microbatches and of their passes (``scheduler``).
"""

from .assigner import DynaPipeAssigner
from .scheduler import DynaPipeScheduler

__all__ = ["DynaPipeAssigner", "DynaPipeScheduler"]
