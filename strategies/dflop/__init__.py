"""DFLOP (arXiv:2603.25120): a layout from mean shapes and measured throughputs, microbatches balanced every step.

Profiling engine (``profiling``), data-aware 3D parallelism optimizer (``planner``, ``space``), online microbatch
scheduler (``assigner``), adaptive correction (``correction``).
"""

from .assigner import DflopAssigner
from .correction import Corrector
from .planner import DflopPlanner

__all__ = ["Corrector", "DflopAssigner", "DflopPlanner"]
