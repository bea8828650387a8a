"""Executor 1: place a program's actions on a simulated clock."""

from entrain_bench.simulate.engine import place_actions
from entrain_bench.simulate.executor import Simulator

__all__ = ["Simulator", "place_actions"]
