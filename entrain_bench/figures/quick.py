"""Iteration time of the baseline and the four systems on five traces, one seed: ``iteration_time`` in a minute."""

from entrain_bench.figures.iteration_time import draw, load

__all__ = ["EXPERIMENT", "RUNS", "draw", "load"]

EXPERIMENT = "quick"
RUNS = True
