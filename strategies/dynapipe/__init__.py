"""DynaPipe (arXiv:2311.10418): microbatches of sorted samples (``assigner``), an adaptive schedule (``scheduler``)."""

from .assigner import DynaPipeAssigner
from .scheduler import DynaPipeScheduler

__all__ = ["DynaPipeAssigner", "DynaPipeScheduler"]
