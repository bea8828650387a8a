"""DFLOP (arXiv:2603.25120): a layout from mean shapes and measured throughputs, microbatches balanced every step."""

from entrain_bench.balancing.estimates import Corrector

from .assigner import DflopAssigner
from .planner import DflopPlanner

__all__ = ["Corrector", "DflopAssigner", "DflopPlanner"]
