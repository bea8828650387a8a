"""DynaPipe (arXiv:2311.10418): microbatches cut from sorted samples by a dynamic program, and an adaptive schedule.

What a microbatch is believed to take on every stage (``costs``), the cuts (``partition``, ``assigner``), and the order
of the microbatches and of their passes (``cycles``, ``scheduler``).
"""

from .assigner import DynaPipeAssigner
from .scheduler import DynaPipeScheduler

__all__ = ["DynaPipeAssigner", "DynaPipeScheduler"]
