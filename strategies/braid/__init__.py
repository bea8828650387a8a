"""Braid, this project's own: encoders and LLM on all ranks of a replica, encoder work where the LLM leaves time.

Layouts (``planner``), balance in two dimensions and levelled encoder work (``assigner``, ``work``),
packs on groups of several widths (``packs``) and the search over orders of microbatches (``scheduler``).
"""

from .assigner import BraidAssigner
from .planner import BraidPlanner
from .scheduler import BraidScheduler

__all__ = ["BraidAssigner", "BraidPlanner", "BraidScheduler"]
